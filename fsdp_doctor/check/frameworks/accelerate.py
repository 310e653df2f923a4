"""accelerate: ``fsdp_config`` of its YAML, versions 1 and 2, as `accelerate launch` reads it.

Read in accelerate at 1.15.0.dev: commands/launch.py and utils/launch.py for what absent keys mean, state.py for the
backend (gloo beside NCCL since 1.7.0, PR 3574); what is in ``fsdp_section``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from fsdp_doctor.check.config_findings import conflict
from fsdp_doctor.check.configured_model import ConfiguredModel
from fsdp_doctor.check.frameworks import fsdp_section
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    ModelReading,
    ModelSettings,
    VersionRange,
    in_question,
    not_under_fsdp,
)
from fsdp_doctor.check.frameworks.fsdp_section import SECTION, FsdpVersion, keys
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import Use, because, reasons_of
from fsdp_doctor.matrix.axes import AxisName, Backend, Sharding
from fsdp_doctor.matrix.cases import Scenario

_KEYS = fsdp_section.with_prefix(fsdp_section.PLUGIN_KEYS)
# By the first letters of the name of a torch.distributed.fsdp.ShardingStrategy, or its number.
_SHARDING: dict[str, Sharding] = {"HYBRID": "hsdp", "NO_SHA": "size1", "4": "hsdp", "5": "hsdp", "3": "size1"}


@dataclass(frozen=True, kw_only=True)
class _AccelerateVersions(VersionRange):
    """offload_backend: of the process group with ``offload_params``."""

    offload_backend: Backend


_VERSIONS = (
    _AccelerateVersions(label="before 1.7.0", versions=SpecifierSet("<1.7"), offload_backend="device-only"),
    _AccelerateVersions(label="since 1.7.0", versions=SpecifierSet(">=1.7"), offload_backend="mixed"),
)


def _recognises(settings: Settings) -> bool:
    fragment = any(row.key.startswith(f"{SECTION}.fsdp_") for row in settings)
    of_trainer = "fsdp" in settings or "output_dir" in settings
    return "distributed_type" in settings or "compute_environment" in settings or (fragment and not of_trainer)


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    read = functools.partial(_read, settings, given)
    return [ModelSettings(role="model", sections=(SECTION,), keys=_KEYS, read=read)]


def _read(settings: Settings, given: Given) -> ModelReading:
    launched = settings.first("distributed_type")
    if launched is not None and launched.value != "FSDP":
        ignored = [row for row in settings.below(SECTION) if row.value is not None][:1]
        sentence = "accelerate reads fsdp_config only with distributed_type=FSDP"
        return not_under_fsdp("model", launched, *(conflict(sentence, launched, row) for row in ignored))
    version = fsdp_section.fsdp_version(settings, default=1)
    return ModelReading(
        uses=[_use(settings, version, versions) for versions in in_question(_VERSIONS, given.framework_version)],
        model=ConfiguredModel(
            path=settings.first("model_name_or_path"), ranks=_shard_group(settings, version, given.world_size)
        ),
        findings=fsdp_section.version_conflicts(settings, version),
    )


def _use(settings: Settings, version: FsdpVersion, versions: _AccelerateVersions) -> Use:
    version_row, offload_row = settings.first(*keys("version")), settings.first(*keys("offload_params"))
    orig_row = settings.first(*keys("use_orig_params"))
    offloads = settings.flag(*keys("offload_params"))
    whole = settings.word(*keys("state_dict_type")).upper() == "FULL_STATE_DICT"
    scenario = Scenario(
        strategy=fsdp_section.strategy_of(settings, version),
        offload="policy" if offloads else "none",
        staging="unstaged",
        backend=versions.offload_backend if offloads else "mixed" if whole else "device-only",
        sharding=_sharding(settings, version),
    )
    strategy_why = because(version_row, "fsdp_version=1 is the default")
    if version == 1:
        orig_why = because(orig_row, "use_orig_params=true is the default of accelerate launch")
        strategy_why = f"{strategy_why}; {orig_why}"
    whys: dict[AxisName, str] = {
        "strategy": strategy_why,
        "offload": because(offload_row, "fsdp_offload_params=false is the default"),
        "backend": "accelerate/state.py: gloo beside NCCL for offload_params since 1.7.0, and for FULL_STATE_DICT",
        "sharding": "" if scenario.sharding == "full" else str(settings.first(*keys("sharding_strategy"))),
    }
    state_dict_type = fsdp_section.state_dict_type(settings, fsdp_section.DEFAULT_STATE_DICT_TYPE[version])
    return Use(
        role="model",
        versions=versions.label,
        scenario=scenario,
        reasons=reasons_of(scenario, whys),
        extractions=fsdp_section.extraction_points(scenario, version, state_dict_type, vllm=settings.flag("use_vllm")),
    )


def _sharding(settings: Settings, version: FsdpVersion) -> Sharding:
    row = settings.first(*keys("sharding_strategy"))
    return _SHARDING.get(str(row.value).upper()[:6], "full") if row and version == 1 else "full"


def _world_size(settings: Settings) -> int | None:
    return settings.number("num_processes")


def _shard_group(settings: Settings, version: FsdpVersion, world_size: int | None) -> int | None:
    if world_size is None:
        return None
    machines = settings.number("num_machines", default=1) or 1
    by_sharding: dict[Sharding, int] = {"full": world_size, "size1": 1, "hsdp": max(1, world_size // machines)}
    return by_sharding[_sharding(settings, version)]


ACCELERATE = Framework(
    name="accelerate",
    known_by="distributed_type, compute_environment or fsdp_config.fsdp_*",
    recognises=_recognises,
    models=_models,
    world_size=_world_size,
)
