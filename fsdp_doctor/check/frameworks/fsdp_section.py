"""``fsdp_config``, the section of settings that accelerate and Hugging Face's Trainer share.

Read in accelerate at 1.15.0.dev: utils/dataclasses.py (FullyShardedDataParallelPlugin) for what a version ignores or
refuses, Accelerator.get_state_dict and utils/fsdp_utils.py for what is read. TRL's sync to vLLM, where ``use_vllm``
is beside it, in trl/generation/vllm_generation.py.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from fsdp_doctor.check.config_findings import ConfigFinding, conflict
from fsdp_doctor.check.settings import Settings
from fsdp_doctor.check.use import ExtractionPoint
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import Strategy
from fsdp_doctor.matrix.cases import Case, Scenario

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
_SYNC: dict[FsdpVersion, str] = {1: "summon_full_params", 2: "state_dict.to.full_tensor"}
# What the plugin takes where no state_dict_type is set.
DEFAULT_STATE_DICT_TYPE: dict[FsdpVersion, str] = {1: "FULL_STATE_DICT", 2: "SHARDED_STATE_DICT"}


def keys(name: str) -> tuple[str, str]:
    """A key of the section with accelerate's prefix, and without."""
    return f"{SECTION}.fsdp_{name}", f"{SECTION}.{name}"


def with_prefix(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of keys as they may stand in the section: each with accelerate's prefix, and without."""
    return (*(f"fsdp_{name}" for name in names), *names)


def fsdp_version(settings: Settings, *, default: FsdpVersion) -> FsdpVersion:
    """Raises UsageError for one that there is not."""
    row = settings.first(*keys("version"))
    if row is None:
        return default
    if str(row.value) not in _VERSIONS:
        raise UsageError(f"{row}: the version of FSDP in fsdp_config must be 1 or 2")
    return _VERSIONS[str(row.value)]


def strategy_of(settings: Settings, version: FsdpVersion) -> Strategy:
    if version == 2:
        return "fsdp2"
    return "fsdp1-orig" if settings.flag(*keys("use_orig_params"), default=True) else "fsdp1"


def state_dict_type(settings: Settings, default: str) -> str:
    return settings.word(*keys("state_dict_type"), default=default).upper()


def extraction_points(
    scenario: Scenario, version: FsdpVersion, state_dict_type: str, *, vllm: bool
) -> tuple[ExtractionPoint, ...]:
    """What Accelerator.get_state_dict and save_fsdp_model read, unstaged, and TRL's sync_weights with ``vllm``."""
    paths = {
        "whole model (get_state_dict)": _WHOLE[version],
        "checkpoint (save_state)": _CHECKPOINT.get((version, state_dict_type)),
        "weights for vLLM (TRL)": _SYNC[version] if vllm else None,
    }
    return tuple(ExtractionPoint(purpose=purpose, case=Case(scenario, path)) for purpose, path in paths.items() if path)


def version_conflicts(settings: Settings, version: FsdpVersion) -> list[ConfigFinding]:
    """Keys of the other version: what becomes of them is in FullyShardedDataParallelPlugin.__post_init__."""
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
