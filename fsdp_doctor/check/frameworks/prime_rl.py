"""prime-rl: ``model`` of its trainer's TOML, which in the file of a whole run stands below ``trainer``.

Read in prime-rl at v0.3.0 to v0.8.0: configs/trainer.py (ModelConfig) for the keys and their defaults, trainer/model.py
(setup_fsdp) for the policy, trainer/utils.py (setup_torch_distributed) for the backend, utils/weights.py and
trainer/ckpt.py for what is read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from fsdp_doctor.check.config_findings import ConfigFinding, conflict
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    KeyTable,
    ModelReading,
    ModelSettings,
    VersionRange,
    in_question,
)
from fsdp_doctor.check.launch_commands import SECTION as LAUNCH
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Chosen, ExtractionPoint, Use, extraction, loading, use_of
from fsdp_doctor.matrix.cases import Scenario

_SECTIONS = ("trainer.model", "model")


def _keys(*names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for section in _SECTIONS for name in names)


_TABLE = KeyTable(
    policy=_keys("fsdp_cpu_offload"),
    optimizer_offload=_keys("optim_cpu_offload"),
    replicas=_keys("dp_replicate"),
    path=_keys("name"),
)
_OWN = _keys("fsdp_cpu_offload", "optim_cpu_offload", "full_offload", "dp_replicate")


@dataclass(frozen=True, kw_only=True)
class _PrimeVersions(VersionRange):
    """optimizer: whether the optimizer's state is offloaded where nothing is said."""

    optimizer: bool = False


_VERSIONS = (
    _PrimeVersions(label="before v0.7", versions=SpecifierSet("<0.7")),
    _PrimeVersions(label="since v0.7", versions=SpecifierSet(">=0.7"), optimizer=True),
)


def _recognises(settings: Settings) -> bool:
    run = bool(settings.below("orchestrator")) and bool(settings.below("trainer") or settings.below("inference"))
    sft = "deployment.num_train_gpus" in settings or ("model.name" in settings and "data.name" in settings)
    return run or any(key in settings for key in _OWN) or (sft and bool(settings.below("optim")))


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    return [ModelSettings(role="actor", sections=(), keys=(), read=functools.partial(_read, settings, given))]


def _read(settings: Settings, given: Given) -> ModelReading:
    return ModelReading(
        uses=[_use(settings, versions, given) for versions in in_question(_VERSIONS, given.framework_version)],
        model=_TABLE.configured_model(settings, given.world_size),
        findings=_conflicts(settings),
    )


def _use(settings: Settings, versions: _PrimeVersions, given: Given) -> Use:
    offload = _TABLE.offload(settings, "prime-rl's default")
    full = settings.first(*_keys("full_offload"))
    if offload.value == "none" and full is not None and settings.flag(full.key):
        offload = Chosen("optimizer", full)
    elif offload.value == "none" and versions.optimizer and settings.first(*_TABLE.optimizer_offload) is None:
        offload = Chosen("optimizer", "optim_cpu_offload=true is the default since v0.7")
    return use_of(
        "actor",
        versions.label,
        {
            "strategy": Chosen("fsdp2", "prime-rl uses fully_shard only"),
            "offload": offload,
            "sharding": _TABLE.sharding(settings, given.world_size),
            "backend": Chosen(
                "mixed" if offload.value == "policy" else "device-only",
                "prime_rl/trainer/utils.py: gloo beside NCCL only with fsdp_cpu_offload",
            ),
        },
        functools.partial(_extraction_points, settings=settings),
    )


def _extraction_points(scenario: Scenario, settings: Settings) -> list[ExtractionPoint]:
    points = [extraction("weights for inference", scenario, "state_dict.full_tensor.to")]
    saves = "ckpt" in settings or bool(settings.below("ckpt") or settings.below("trainer.ckpt"))
    if saves:
        points.append(extraction("checkpoint", scenario, "get_model_state_dict.sharded"))
        points.append(loading("resume", scenario, "dcp.load.model+optimizer"))
    return points


def _conflicts(settings: Settings) -> list[ConfigFinding]:
    if settings.flag(*_TABLE.policy) and settings.flag(*_TABLE.optimizer_offload):
        both = settings.first(*_TABLE.policy), settings.first(*_TABLE.optimizer_offload)
        return [conflict("prime-rl rejects fsdp_cpu_offload together with optim_cpu_offload", *both)]
    return []


def _world_size(settings: Settings) -> int | None:
    nodes = settings.number("deployment.num_train_nodes")
    if nodes:
        return nodes * (settings.number("deployment.gpus_per_node", default=8) or 8)
    gpus = settings.number("deployment.num_train_gpus", f"{LAUNCH}.trainer_gpus", "trainer_gpus")
    return gpus or settings.count("trainer_gpu_ids")


PRIME_RL = Framework(
    name="prime-rl",
    read_in="v0.3.0 to v0.8.0",
    distributions=("prime-rl",),
    recognises=_recognises,
    models=_models,
    world_size=_world_size,
)
