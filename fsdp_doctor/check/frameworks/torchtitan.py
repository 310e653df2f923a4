"""torchtitan: the TOML of its JobConfig, which its releases up to v0.2.2 read.

Read in torchtitan at v0.2.2: config/job_config.py for the defaults, distributed/utils.py (init_distributed) for the
backend, models/llama3/infra/parallelize.py for the policy, components/checkpoint.py for what is read.
"""

from __future__ import annotations

from fsdp_doctor.check.findings import ConfigFinding, conflict, unknown
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    KeyTable,
    ModelReading,
    find_other_parallelisms,
    load_known_keys,
    not_under_fsdp,
)
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Chosen, ExtractionPoint, Role, extraction, loading, use_of
from fsdp_doctor.matrix.cases import Scenario

_SECTION = "parallelism"
_DEGREES = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree")
_OFFLOAD = "training.enable_cpu_offload"
_SHARD = f"{_SECTION}.data_parallel_shard_degree"
_CONTEXT = f"{_SECTION}.context_parallel_degree"
_TABLE = KeyTable(policy=(_OFFLOAD,), replicas=(f"{_SECTION}.data_parallel_replicate_degree",))


class Torchtitan(Framework):
    name = "torchtitan"
    read_in = "v0.2.2"
    distributions = ("torchtitan",)
    keys = load_known_keys("torchtitan")

    def recognizes(self, settings: Settings) -> bool:
        return _OFFLOAD in settings or bool(settings.below(_SECTION) and settings.below("training"))

    def models(self, settings: Settings, given: Given) -> dict[Role, tuple[str, ...]]:
        return {"model": (_SECTION,)}

    def read(self, role: Role, settings: Settings, given: Given) -> ModelReading:
        offload = _TABLE.offload(settings, "enable_cpu_offload=false is the default")
        if settings.number(_SHARD) == 1 and (settings.number(_CONTEXT) or 1) == 1:
            shard = settings.first(_SHARD)
            sentence = (
                "enable_cpu_offload is a setting of FSDP, and nothing is sharded with data_parallel_shard_degree=1"
            )
            ignored = [conflict(sentence, settings.first(_OFFLOAD), shard)] if offload.policy else []
            return not_under_fsdp(role, shard, *ignored)
        use = use_of(
            role,
            "",
            {
                "strategy": Chosen("fsdp2", "torchtitan uses fully_shard only"),
                "offload": offload.chosen,
                "backend": Chosen(
                    "mixed" if offload.policy else "device-only",
                    "torchtitan/distributed/utils.py: gloo beside NCCL only with enable_cpu_offload",
                ),
                "sharding": _TABLE.sharding(settings, given.world_size),
            },
            _checkpoints if settings.flag("checkpoint.enable", "checkpoint.enable_checkpoint") else lambda scenario: (),
        )
        return ModelReading(uses=(use,), findings=find_other_parallelisms(settings, _SECTION, _DEGREES))

    def findings(self, settings: Settings) -> list[ConfigFinding]:
        """An offload under a name that torchtitan does not know."""
        return [
            unknown(
                f"{row.key.removeprefix('training.')!r} is not a known key of training (did you mean {_OFFLOAD}?)", row
            )
            for row in settings.below("training")
            if row.key != _OFFLOAD and "offload" in row.key
        ]


def _checkpoints(scenario: Scenario) -> tuple[ExtractionPoint, ...]:
    return (
        extraction("checkpoint", scenario, "get_model_state_dict.sharded"),
        extraction("checkpoint", scenario, "dcp"),
        loading("resume", scenario, "dcp.load.model+optimizer"),
    )
