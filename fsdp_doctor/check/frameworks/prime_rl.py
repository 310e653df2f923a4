"""prime-rl: ``model`` in its trainer's TOML, or ``trainer.model`` in the file of a whole run.

Sources read in prime-rl v0.3.0 to v0.8.0: configs/trainer.py (ModelConfig) for the keys and their defaults;
trainer/model.py (setup_fsdp) for the policy; trainer/utils.py (setup_torch_distributed) for the backend;
utils/weights.py and trainer/ckpt.py for the extractions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from fsdp_doctor.check.findings import report_conflict
from fsdp_doctor.check.framework import FsdpFramework, Keys, KeyTable, ModelReading, VersionRange, load_facts
from fsdp_doctor.check.launch_commands import SECTION as LAUNCH
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Chosen, ExtractionPoint, Role, make_extraction_point, make_loading_point
from fsdp_doctor.matrix.axes import AxisName, Backend, Strategy
from fsdp_doctor.matrix.cases import Scenario


class _Keys(KeyTable, frozen=True, kw_only=True):
    """Keys of prime-rl; ``full_offload`` turns on manual offload of the model and the optimizer."""

    full_offload: Keys


class _Versions(VersionRange, frozen=True, kw_only=True):
    """Range of versions; ``offloads_optimizer`` is true if the optimizer state is offloaded by default."""

    offloads_optimizer: bool


_FACTS = load_facts("prime_rl", _Versions, _Keys)
_KEYS = _FACTS.models["actor"]


class PrimeRl(FsdpFramework[_Versions]):
    facts = _FACTS

    @staticmethod
    def recognizes(settings: Settings) -> bool:
        is_run = bool(settings.list_below("orchestrator")) and bool(
            settings.list_below("trainer") or settings.list_below("inference")
        )
        is_sft = "deployment.num_train_gpus" in settings or ("model.name" in settings and "data.name" in settings)
        keys = (*_KEYS.policy, *_KEYS.optimizer_offload, *_KEYS.full_offload, *_KEYS.replicas)
        return is_run or any(key in settings for key in keys) or (is_sft and bool(settings.list_below("optim")))

    @staticmethod
    def count_ranks(settings: Settings) -> int | None:
        if nodes := settings.read_number("deployment.num_train_nodes"):
            return nodes * (settings.read_number("deployment.gpus_per_node", default=8) or 8)
        gpus = settings.read_number("deployment.num_train_gpus", f"{LAUNCH}.trainer_gpus", "trainer_gpus")
        return gpus or settings.count("trainer_gpu_ids")

    def read(self, role: Role) -> ModelReading:
        both = self.settings.find_first_true(*_KEYS.policy), self.settings.find_first_true(*_KEYS.optimizer_offload)
        sentence = "prime-rl rejects fsdp_cpu_offload together with optim_cpu_offload"
        return self.read_role(role, [report_conflict(sentence, *both)] if all(both) else [])

    def choose_axes(self, role: Role, versions: _Versions) -> dict[AxisName, Chosen]:
        offload = self.choose_offload(role, "prime-rl's default")
        if not offload.policy and not offload.optimizer:
            is_unset = self.settings.find_first(*_KEYS.optimizer_offload) is None
            default = "optim_cpu_offload=true is the default since v0.7"
            by_default = default if versions.offloads_optimizer and is_unset else None
            offload = dataclasses.replace(
                offload, optimizer=self.settings.find_first_true(*_KEYS.full_offload) or by_default
            )
        return {
            "strategy": Chosen(Strategy.FSDP2, "prime-rl uses fully_shard only"),
            "offload": offload.chosen,
            "sharding": self.choose_sharding(role),
            "model": self.choose_model(role),
            "backend": Chosen(
                Backend.MIXED if offload.policy else Backend.DEVICE_ONLY,
                "prime_rl/trainer/utils.py: gloo in addition to NCCL only with fsdp_cpu_offload",
            ),
        }

    def list_extractions(self, role: Role, versions: _Versions, scenario: Scenario) -> Iterator[ExtractionPoint]:
        yield make_extraction_point("weights for inference", scenario, "state_dict.full_tensor.to")
        if "ckpt" in self.settings or self.settings.list_below("ckpt") or self.settings.list_below("trainer.ckpt"):
            yield make_extraction_point("checkpoint", scenario, "get_model_state_dict.sharded")
            yield make_loading_point("resume", scenario, "dcp.load.model+optimizer")
