"""torchtitan: the TOML of its JobConfig, which releases up to v0.2.2 read.

Sources read in torchtitan v0.2.2: config/job_config.py for the defaults; distributed/utils.py (init_distributed) for
the backend; models/llama3/infra/parallelize.py for the offload policy; components/checkpoint.py for the extractions.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_doctor.check.findings import ConfigFinding, ConfiguredModel, report_conflict, report_unknown
from fsdp_doctor.check.framework import FsdpFramework, ModelReading, VersionRange, load_facts, report_not_under_fsdp
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Chosen, ExtractionPoint, Role, make_extraction_point, make_loading_point
from fsdp_doctor.matrix.axes import AxisName, Backend, Strategy
from fsdp_doctor.matrix.cases import Scenario

_SECTION = "parallelism"
_DEGREES = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree")
_OFFLOAD = "training.enable_cpu_offload"
_SHARD = f"{_SECTION}.data_parallel_shard_degree"
_CONTEXT = f"{_SECTION}.context_parallel_degree"


class Torchtitan(FsdpFramework[VersionRange]):
    facts = load_facts("torchtitan")

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        return _OFFLOAD in settings or bool(settings.list_below(_SECTION) and settings.list_below("training"))

    def read(self, role: Role) -> ModelReading:
        offload = self.settings.find_first_true(_OFFLOAD)
        if self.settings.read_number(_SHARD) == 1 and (self.settings.read_number(_CONTEXT) or 1) == 1:
            shard = self.settings.find_first(_SHARD)
            sentence = (
                "enable_cpu_offload is a setting of FSDP, and nothing is sharded with data_parallel_shard_degree=1"
            )
            return report_not_under_fsdp(role, shard, *([report_conflict(sentence, offload, shard)] if offload else []))
        return self.read_role(role, self.find_other_parallelisms(_SECTION, _DEGREES))

    def read_model(self, role: Role) -> ConfiguredModel:
        """Returns an empty model, since the configuration only names a size of torchtitan's own model."""
        return ConfiguredModel()

    def choose_axes(self, role: Role, versions: VersionRange) -> dict[AxisName, Chosen]:
        offload = self.choose_offload(role, "enable_cpu_offload=false is the default")
        return {
            "strategy": Chosen(Strategy.FSDP2, "torchtitan uses fully_shard only"),
            "offload": offload.chosen,
            "backend": Chosen(
                Backend.MIXED if offload.policy else Backend.DEVICE_ONLY,
                "torchtitan/distributed/utils.py: gloo in addition to NCCL only with enable_cpu_offload",
            ),
            "sharding": self.choose_sharding(role),
        }

    def list_extractions(self, role: Role, versions: VersionRange, scenario: Scenario) -> Iterator[ExtractionPoint]:
        if self.settings.read_flag("checkpoint.enable", "checkpoint.enable_checkpoint"):
            yield make_extraction_point("checkpoint", scenario, "get_model_state_dict.sharded")
            yield make_extraction_point("checkpoint", scenario, self._name_save())
            yield make_loading_point("resume", scenario, "dcp.load.model+optimizer")

    def _name_save(self) -> str:
        """Returns the name of the method that saves. Like torchtitan, ignores the case of the configured mode."""
        match self.settings.read_word("checkpoint.async_mode").lower():
            case "async":
                return "dcp.async_save"
            case "async_with_pinned_mem":
                return "dcp.async_save.pinned"
            case _:
                return "dcp"

    def find_problems(self) -> list[ConfigFinding]:
        """Finds offload settings with names that torchtitan does not know."""
        return [
            report_unknown(
                f"{row.key.removeprefix('training.')!r} is not a known key of training (did you mean {_OFFLOAD}?)", row
            )
            for row in self.settings.list_below("training")
            if row.key != _OFFLOAD and "offload" in row.key
        ]
