"""Lightning: FSDPStrategy and ModelParallelStrategy, in a Python script or in LightningCLI's YAML.

Read in Lightning at 2.0.0, 2.1.0, 2.2.0 and 2.6.5: pytorch/strategies/fsdp.py for absent arguments and for what a
checkpoint reads, model_parallel.py, and fabric/utilities/distributed.py for the backend (NCCL alone on CUDA).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from fsdp_doctor.check.config_findings import conflict, note
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    ModelReading,
    ModelSettings,
    VersionRange,
    in_question,
    not_under_fsdp,
)
from fsdp_doctor.check.python_calls import TORCH, called_offload
from fsdp_doctor.check.settings import Expression, Settings, Unreadable
from fsdp_doctor.check.use import Chosen, ExtractionPoint, Use, extraction, use_of
from fsdp_doctor.matrix.axes import Sharding
from fsdp_doctor.matrix.cases import Scenario

# Where the arguments of a strategy stand.
_ARGUMENTS = ("FSDPStrategy", "trainer.strategy.init_args", "strategy.init_args")
_STRATEGY = ("lightning.strategy", "trainer.strategy", "trainer.strategy.class_path", "strategy.class_path")
_WORDS = ("fsdp", "fsdp_cpu_offload", "fsdp_native", "fsdp_native_full_shard_offload")
_SHARDING: dict[str, Sharding] = {"HYBRID_SHARD": "hsdp", "_HYBRID_SHARD_ZERO2": "hsdp", "NO_SHARD": "size1"}
_MODEL_PARALLEL = "ModelParallelStrategy"


@dataclass(frozen=True, kw_only=True)
class _LightningVersions(VersionRange):
    """use_orig_params: where it is not set."""

    use_orig_params: bool = True


_VERSIONS = (
    _LightningVersions(label="before 2.1", versions=SpecifierSet("<2.1"), use_orig_params=False),
    _LightningVersions(label="since 2.1", versions=SpecifierSet(">=2.1")),
)


def _keys(name: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for section in _ARGUMENTS)


def _recognises(settings: Settings) -> bool:
    if any(f"{name}.called" in settings for name in ("FSDPStrategy", _MODEL_PARALLEL)):
        return True
    row = settings.first(*_STRATEGY)
    ours = row is not None and (row.key.startswith("lightning.") or row.key.endswith("class_path"))
    return ours or (row is not None and str(row.value) in (*_WORDS, "ddp", "ddp_find_unused_parameters_true"))


def _complete(settings: Settings) -> Settings:
    """A Trainer that is given a strategy by its name uses none that the script makes; of several Trainers, one may."""
    row = settings.first("lightning.strategy")
    named = row is not None and isinstance(row.value, str) and not isinstance(row.value, Expression)
    if not named or "lightning.strategy" in settings.replaced:
        return settings
    made = ("FSDPStrategy", _MODEL_PARALLEL)
    return Settings.of(row for row in settings if row.key.partition(".")[0] not in made)


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    return [ModelSettings(role="model", sections=(), keys=(), read=functools.partial(_read, settings, given))]


def _read(settings: Settings, given: Given) -> ModelReading:
    row = settings.first(*_STRATEGY)
    if f"{_MODEL_PARALLEL}.called" in settings or (row and _MODEL_PARALLEL in str(row.value)):
        return _model_parallel(settings)
    word = str(row.value) if row else "FSDPStrategy"
    if "FSDPStrategy.called" not in settings and word not in _WORDS and "FSDPStrategy" not in word:
        if row is not None and re.fullmatch(r"[A-Za-z_.]*(?:ddp|DDP|DeepSpeed|deepspeed|auto|Single)\w*", word):
            return not_under_fsdp("model", row)
        raise Unreadable(f"{row} does not say which strategy it is")
    return ModelReading(uses=[_use(settings, versions) for versions in in_question(_VERSIONS, given.framework_version)])


def _use(settings: Settings, versions: _LightningVersions) -> Use:
    orig = settings.first(*_keys("use_orig_params"))
    flat = not settings.flag(*_keys("use_orig_params"), default=versions.use_orig_params)
    backend = settings.first(*_keys("process_group_backend"))
    return use_of(
        "model",
        versions.label,
        {
            "strategy": Chosen(
                "fsdp1" if flat else "fsdp1-orig", orig or f"use_orig_params={not flat} is the default".lower()
            ),
            "offload": _offload(settings),
            "backend": Chosen(
                "mixed" if backend and "gloo" in str(backend.value) else "device-only",
                backend or "Lightning's default is NCCL alone",
            ),
            "sharding": _sharding(settings),
        },
        functools.partial(_checkpoint, sharded=settings.word(*_keys("state_dict_type"), default="full") == "sharded"),
    )


def _offload(settings: Settings) -> Chosen:
    row = settings.first(*_keys("cpu_offload"))
    if row is None:
        strategy = settings.first(*_STRATEGY)
        offloads = strategy is not None and "offload" in str(strategy.value)
        return Chosen("policy", strategy) if offloads else Chosen("none", "cpu_offload=None is the default")
    called = called_offload(row.value)
    return Chosen("policy" if (settings.flag(row.key) if called is None else called) else "none", row)


def _sharding(settings: Settings) -> Chosen:
    row = settings.first(*_keys("sharding_strategy"))
    word = str(row.value).rpartition(".")[2].upper() if row else "FULL_SHARD"
    sharding = _SHARDING.get(word, "full")
    return Chosen(sharding, row if sharding != "full" else None)


def _checkpoint(scenario: Scenario, sharded: bool) -> list[ExtractionPoint]:
    return [extraction("checkpoint", scenario, "sharded_state_dict" if sharded else "full_state_dict.rank0+cpu")]


def _model_parallel(settings: Settings) -> ModelReading:
    """FSDP2, which the script's own configure_model asks for."""
    called = settings.first(f"{TORCH}.fully_shard.called")
    policy = settings.first(f"{TORCH}.fully_shard.offload_policy")
    offloads = policy is not None and "CPUOffloadPolicy" in str(policy.value)
    if policy is not None and not offloads and "OffloadPolicy" not in str(policy.value):
        raise Unreadable(f"{policy} does not say whether it is CPUOffloadPolicy")
    whole = not settings.flag(f"{_MODEL_PARALLEL}.save_distributed_checkpoint", default=True)
    path = "get_model_state_dict.full+cpu" if whole else "get_model_state_dict.sharded+cpu"
    use = use_of(
        "model",
        "",
        {
            "strategy": Chosen("fsdp2", called or "ModelParallelStrategy has the script call fully_shard"),
            "offload": Chosen("policy" if offloads else "none", policy or (called and "its fully_shard has no policy")),
            "backend": Chosen("device-only", "Lightning's default is NCCL alone"),
        },
        lambda scenario: [extraction("checkpoint", scenario, path)],
    )
    sentence = (
        "ModelParallelStrategy moves the model to the device as it sets it up, which FSDP2 refuses under "
        "CPUOffloadPolicy: its parameters must stay on the CPU"
    )
    findings = [conflict(sentence, policy)] if offloads else []
    if called is None:
        sentence = "the fully_shard that configure_model calls is not here: whether it has a policy is not known"
        findings.append(note(sentence, settings.first(f"{_MODEL_PARALLEL}.called", *_STRATEGY)))
    return ModelReading(uses=(use,), findings=findings)


def _world_size(settings: Settings) -> int | None:
    devices = settings.count("lightning.devices", "trainer.devices")
    return devices and devices * (settings.count("lightning.num_nodes", "trainer.num_nodes") or 1)


LIGHTNING = Framework(
    name="Lightning",
    read_in="2.0.0 to 2.6.5",
    distributions=("lightning", "pytorch-lightning"),
    recognises=_recognises,
    complete=_complete,
    models=_models,
    world_size=_world_size,
)
