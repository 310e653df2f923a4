"""prime-rl: ``model`` of its trainer's TOML, which in the file of a whole run is below ``trainer``.

Read in prime-rl at v0.3.0 to v0.8.0: configs/trainer.py (ModelConfig) for the keys and their defaults, trainer/model.py
(setup_fsdp) for the policy, trainer/utils.py (setup_torch_distributed) for the backend, utils/weights.py and
trainer/ckpt.py for what is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_doctor.check.findings import ConfigFinding, conflict
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    KeyTable,
    ModelReading,
    VersionRange,
    get_if_true,
    matching,
)
from fsdp_doctor.check.launch_commands import SECTION as LAUNCH
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Chosen, ExtractionPoint, Role, Use, extraction, loading, use_of
from fsdp_doctor.matrix.cases import Scenario


def _keys(*names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for section in ("trainer.model", "model") for name in names)


_TABLE = KeyTable(
    policy=_keys("fsdp_cpu_offload"),
    optimizer_offload=_keys("optim_cpu_offload"),
    replicas=_keys("dp_replicate"),
    path=_keys("name"),
)
_PRIME_KEYS = _keys("fsdp_cpu_offload", "optim_cpu_offload", "full_offload", "dp_replicate")


@dataclass(frozen=True)
class _Versions(VersionRange):
    """optimizer: whether the optimizer's state is offloaded where nothing is said."""

    optimizer: bool


_VERSIONS = (_Versions("before v0.7", "<0.7", False), _Versions("since v0.7", ">=0.7", True))


class PrimeRl(Framework):
    name = "prime-rl"
    read_in = "v0.3.0 to v0.8.0"
    distributions = ("prime-rl",)

    def recognizes(self, settings: Settings) -> bool:
        is_run = bool(settings.below("orchestrator")) and bool(settings.below("trainer") or settings.below("inference"))
        is_sft = "deployment.num_train_gpus" in settings or ("model.name" in settings and "data.name" in settings)
        return is_run or any(key in settings for key in _PRIME_KEYS) or (is_sft and bool(settings.below("optim")))

    def world_size(self, settings: Settings) -> int | None:
        if nodes := settings.number("deployment.num_train_nodes"):
            return nodes * (settings.number("deployment.gpus_per_node", default=8) or 8)
        gpus = settings.number("deployment.num_train_gpus", f"{LAUNCH}.trainer_gpus", "trainer_gpus")
        return gpus or settings.count("trainer_gpu_ids")

    def models(self, settings: Settings, given: Given) -> dict[Role, tuple[str, ...]]:
        return {"actor": ()}

    def read(self, role: Role, settings: Settings, given: Given) -> ModelReading:
        return ModelReading(
            uses=[_read_use(settings, versions, given) for versions in matching(_VERSIONS, given.framework_version)],
            model=_TABLE.configured_model(settings, given.world_size),
            findings=_conflicts(settings),
        )


def _read_use(settings: Settings, versions: _Versions, given: Given) -> Use:
    offload = _TABLE.offload(settings, "prime-rl's default")
    if not offload.policy and not offload.optimizer:
        optimizer = get_if_true(settings, *_keys("full_offload"))
        is_unset = settings.first(*_TABLE.optimizer_offload) is None
        default = "optim_cpu_offload=true is the default since v0.7" if versions.optimizer and is_unset else None
        offload = dataclasses.replace(offload, optimizer=optimizer or default)
    return use_of(
        "actor",
        versions.label,
        {
            "strategy": Chosen("fsdp2", "prime-rl uses fully_shard only"),
            "offload": offload.chosen,
            "sharding": _TABLE.sharding(settings, given.world_size),
            "backend": Chosen(
                "mixed" if offload.policy else "device-only",
                "prime_rl/trainer/utils.py: gloo beside NCCL only with fsdp_cpu_offload",
            ),
        },
        lambda scenario: _extraction_points(settings, scenario),
    )


def _extraction_points(settings: Settings, scenario: Scenario) -> Iterator[ExtractionPoint]:
    yield extraction("weights for inference", scenario, "state_dict.full_tensor.to")
    if "ckpt" in settings or settings.below("ckpt") or settings.below("trainer.ckpt"):
        yield extraction("checkpoint", scenario, "get_model_state_dict.sharded")
        yield loading("resume", scenario, "dcp.load.model+optimizer")


def _conflicts(settings: Settings) -> list[ConfigFinding]:
    both = get_if_true(settings, *_TABLE.policy), get_if_true(settings, *_TABLE.optimizer_offload)
    return [conflict("prime-rl rejects fsdp_cpu_offload together with optim_cpu_offload", *both)] if all(both) else []
