"""torchtune: the YAML of its distributed recipes, and ``tune run``.

Read in torchtune at v0.1.1, v0.2.1, v0.3.1, v0.4.0, v0.5.0, v0.6.1: recipes/full_finetune_distributed.py and
lora_finetune_distributed.py for the wrapper and the backend, training/_distributed.py (shard_model,
gather_cpu_state_dict) for the policy and what a checkpoint reads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    KeyTable,
    ModelReading,
    ModelSettings,
    VersionRange,
    in_question,
    not_under_fsdp,
)
from fsdp_doctor.check.launch_commands import SECTION as LAUNCH
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import Chosen, Use, extraction, use_of
from fsdp_doctor.matrix.axes import Backend, Strategy

_TABLE = KeyTable(
    policy=("fsdp_cpu_offload",),
    replicas=("data_parallel_replicate_dim",),
    shard_group=("data_parallel_shard_dim",),
    lora_rank=("model.lora_rank",),
)
# In the name of a recipe, and of its configuration.
_ALONE = "single_device"
_DISTRIBUTED = ("distributed", "fsdp2")
_RECIPE = f"{LAUNCH}.script"


@dataclass(frozen=True, kw_only=True)
class _TorchtuneVersions(VersionRange):
    """path: what a checkpoint reads. backend: of the process group with the offload."""

    strategy: Strategy = "fsdp2"
    path: str = "state_dict.to.full_tensor"
    backend: Backend = "mixed"


_VERSIONS = (
    _TorchtuneVersions(
        label="before v0.3",
        versions=SpecifierSet("<0.3"),
        strategy="fsdp1",
        path="full_state_dict.rank0+cpu",
        backend="device-only",
    ),
    _TorchtuneVersions(label="v0.3 and v0.4", versions=SpecifierSet(">=0.3,<0.5"), backend="device-only"),
    _TorchtuneVersions(label="since v0.5", versions=SpecifierSet(">=0.5")),
)


def _recognises(settings: Settings) -> bool:
    launched = settings.first(f"{LAUNCH}.program")
    component = settings.first("model._component_")
    trained = component is not None and str(component.value).startswith("torchtune.") and settings.below("optimizer")
    return "fsdp_cpu_offload" in settings or (launched is not None and launched.value == "tune") or bool(trained)


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    return [ModelSettings(role="model", sections=(), keys=(), read=functools.partial(_read, settings, given))]


def _read(settings: Settings, given: Given) -> ModelReading:
    recipe = settings.first(_RECIPE)
    if recipe is not None and _ALONE in str(recipe.value):
        return not_under_fsdp("model", recipe)
    if recipe is not None and not any(word in str(recipe.value) for word in _DISTRIBUTED):
        raise Unreadable(f"{recipe} is not one of torchtune's distributed recipes")
    if recipe is None and any(_ALONE in row.file for row in settings):
        return not_under_fsdp("model", "the name of the file is that of a recipe for a single device")
    return ModelReading(
        uses=[_use(settings, versions, given) for versions in in_question(_VERSIONS, given.framework_version)],
        model=_TABLE.configured_model(settings, given.world_size),
    )


def _use(settings: Settings, versions: _TorchtuneVersions, given: Given) -> Use:
    offload = _TABLE.offload(settings, "fsdp_cpu_offload=false is the default")
    return use_of(
        "model",
        versions.label,
        {
            "strategy": Chosen(versions.strategy, "torchtune uses fully_shard since v0.3, and FSDP1 before"),
            "offload": offload,
            "model": _TABLE.model(settings),
            "backend": Chosen(
                versions.backend if offload.value == "policy" else "device-only",
                "the recipes' init_process_group: gloo beside NCCL with the offload since v0.5",
            ),
            "sharding": _TABLE.sharding(settings, given.world_size),
        },
        lambda scenario: [extraction("checkpoint", scenario, versions.path)],
    )


TORCHTUNE = Framework(
    name="torchtune",
    read_in="v0.1.1 to v0.6.1",
    distributions=("torchtune",),
    recognises=_recognises,
    models=_models,
)
