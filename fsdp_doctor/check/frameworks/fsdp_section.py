"""``fsdp_config``, the section of settings that accelerate and Hugging Face's Trainer share.

Read in accelerate at 1.15.0.dev: utils/dataclasses.py (FullyShardedDataParallelPlugin) for what a version ignores or
refuses, Accelerator.get_state_dict and utils/fsdp_utils.py for what is read. TRL's sync to vLLM, where ``use_vllm``
is beside it, in trl/generation/vllm_generation.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.check.config_findings import ConfigFinding, conflict
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.check.use import Chosen, ExtractionPoint, Use, extraction, loading, use_of
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.cases import Scenario

FsdpVersion: TypeAlias = Literal[1, 2]

SECTION = "fsdp_config"
_VERSION_1_ONLY = (
    "sharding_strategy",
    "use_orig_params",
    "backward_prefetch",
    "forward_prefetch",
    "sync_module_states",
)
PLUGIN_KEYS = (
    *_VERSION_1_ONLY,
    *("version", "offload_params", "reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap"),
    *("min_num_params", "state_dict_type", "cpu_ram_efficient_loading", "activation_checkpointing", "ignored_modules"),
    "backward_prefetch_policy",
    *("limit_all_gathers", "transformer_cls_names_to_wrap", "mixed_precision_policy"),
)
_VERSIONS: dict[str, FsdpVersion] = {"1": 1, "2": 2}
_WHOLE: dict[FsdpVersion, str] = {1: "full_state_dict.rank0+cpu", 2: "get_model_state_dict.full+cpu"}
_CHECKPOINT: dict[tuple[FsdpVersion, str], str] = {
    (1, "FULL_STATE_DICT"): "full_state_dict.rank0+cpu",
    (1, "SHARDED_STATE_DICT"): "sharded_state_dict",
    (1, "LOCAL_STATE_DICT"): "local_state_dict",
    (2, "FULL_STATE_DICT"): "get_model_state_dict.full+cpu",
    (2, "SHARDED_STATE_DICT"): "get_model_state_dict.sharded+cpu",
}
# load_fsdp_model and load_fsdp_optimizer of FSDP2.
_RESUME: dict[tuple[FsdpVersion, str], tuple[str, ...]] = {
    (2, "FULL_STATE_DICT"): ("set_model_state_dict.broadcast", "set_optimizer_state_dict.broadcast"),
    (2, "SHARDED_STATE_DICT"): ("dcp.load.model+optimizer",),
}
_SYNC: dict[FsdpVersion, str] = {1: "summon_full_params", 2: "state_dict.to.full_tensor"}
# What the plugin takes where no state_dict_type is set.
DEFAULT_STATE_DICT_TYPE: dict[FsdpVersion, str] = {1: "FULL_STATE_DICT", 2: "SHARDED_STATE_DICT"}


def keys(name: str) -> tuple[str, str]:
    """A key of the section with accelerate's prefix, and without."""
    return f"{SECTION}.fsdp_{name}", f"{SECTION}.{name}"


def with_prefix(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of keys as they may stand in the section: each with accelerate's prefix, and without."""
    return (*(f"fsdp_{name}" for name in names), *names)


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What a framework makes of the section before accelerate's plugin gets it.

    version: of FSDP, with the reason. state_dict_type: where the section has none. vllm: TRL's sync is there too.
    """

    version: FsdpVersion
    version_why: Setting | str
    offload: Chosen
    backend: Chosen
    sharding: Chosen
    model: Chosen | None = None
    state_dict_type: str = ""
    vllm: bool = False


def use_of_section(settings: Settings, plugin: Plugin, versions: str) -> Use:
    orig = settings.first(*keys("use_orig_params"))
    flat = plugin.version == 1 and not settings.flag(*keys("use_orig_params"), default=True)
    why = f"{plugin.version_why}; {orig or 'use_orig_params=true is the default'}"
    strategy = Chosen("fsdp1" if flat else "fsdp1-orig", why) if plugin.version == 1 else None
    return use_of(
        "model",
        versions,
        {
            "strategy": strategy or Chosen("fsdp2", plugin.version_why),
            "offload": plugin.offload,
            "backend": plugin.backend,
            "sharding": plugin.sharding,
            "model": plugin.model or Chosen("qwen3"),
        },
        functools.partial(_extraction_points, plugin=plugin),
    )


def fsdp_version(settings: Settings, *, default: FsdpVersion) -> FsdpVersion:
    """Raises UsageError for one that there is not."""
    row = settings.first(*keys("version"))
    if row is None:
        return default
    if str(row.value) not in _VERSIONS:
        raise UsageError(f"{row}: the version of FSDP in fsdp_config must be 1 or 2")
    return _VERSIONS[str(row.value)]


def state_dict_type(settings: Settings, default: str) -> str:
    return settings.word(*keys("state_dict_type"), default=default).upper()


def _extraction_points(scenario: Scenario, plugin: Plugin) -> tuple[ExtractionPoint, ...]:
    """What Accelerator.get_state_dict and save_fsdp_model read, unstaged, and TRL's sync_weights with ``vllm``."""
    version = plugin.version
    paths = {
        "whole model (get_state_dict)": _WHOLE[version],
        "checkpoint (save_state)": _CHECKPOINT.get((version, plugin.state_dict_type)),
        "weights for vLLM (TRL)": _SYNC[version] if plugin.vllm else None,
    }
    loads = _RESUME.get((version, plugin.state_dict_type), ())
    return (
        *(extraction(purpose, scenario, path) for purpose, path in paths.items() if path),
        *(loading("resume (load_state)", scenario, path) for path in loads),
    )


def version_conflicts(settings: Settings, fsdp_versions: Mapping[str, FsdpVersion]) -> list[ConfigFinding]:
    """Keys of the other version of FSDP, each with the versions that it is the other one for.

    fsdp_versions: by the versions of the framework, empty where they do not differ, the version of FSDP there.
    """
    found = []
    for version in dict.fromkeys(fsdp_versions.values()):
        labels = tuple(f"model, {label}" for label, one in fsdp_versions.items() if one == version and label)
        found += [dataclasses.replace(one, holds_for=labels) for one in _keys_of_other_version(settings, version)]
    return found


def _keys_of_other_version(settings: Settings, version: FsdpVersion) -> list[ConfigFinding]:
    """What becomes of them is in FullyShardedDataParallelPlugin.__post_init__."""
    reshard = settings.first(*keys("reshard_after_forward"))
    if version == 1:
        if reshard and isinstance(reshard.value, bool):
            sentence = "reshard_after_forward belongs to fsdp_version 2; use sharding_strategy with version 1"
            return [conflict(sentence, reshard)]
        return []
    found = []
    if rows := [row for name in _VERSION_1_ONLY if (row := settings.first(*keys(name)))]:
        found.append(conflict("fsdp_version 2 does not read these settings, which belong to version 1", *rows))
    local = settings.first(*keys("state_dict_type"))
    if local and str(local.value).upper() == "LOCAL_STATE_DICT":
        found.append(conflict("accelerate rejects LOCAL_STATE_DICT with fsdp_version 2", local))
    if reshard and str(reshard.value).lower() not in ("true", "false"):
        found.append(conflict("reshard_after_forward must be true or false with fsdp_version 2", reshard))
    return found
