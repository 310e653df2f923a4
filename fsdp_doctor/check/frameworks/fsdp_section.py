"""``fsdp_config``, the section of settings that accelerate and Hugging Face's Trainer share.

Read in accelerate at 1.15.0.dev: utils/dataclasses.py (FullyShardedDataParallelPlugin) for what a version ignores or
refuses, Accelerator.get_state_dict and utils/fsdp_utils.py for what is read. TRL's sync to vLLM, with ``use_vllm``,
in trl/generation/vllm_generation.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.check.findings import ConfigFinding, conflict
from fsdp_doctor.check.frameworks.framework import Keys
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.check.use import Chosen, ExtractionPoint, OffloadChoice, Use, extraction, loading, use_of
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import AxisName
from fsdp_doctor.matrix.cases import Scenario

FsdpVersion: TypeAlias = Literal[1, 2]

SECTION = "fsdp_config"
_VERSION_1_ONLY = (
    *("sharding_strategy", "use_orig_params", "backward_prefetch", "forward_prefetch", "sync_module_states"),
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
_DEFAULT_STATE_DICT_TYPE: dict[FsdpVersion, str] = {1: "FULL_STATE_DICT", 2: "SHARDED_STATE_DICT"}


def keys(name: str) -> tuple[str, str]:
    """A key of the section with accelerate's prefix, and without."""
    return f"{SECTION}.fsdp_{name}", f"{SECTION}.{name}"


def with_prefix(names: Keys) -> Keys:
    """The names of keys of the section, each with accelerate's prefix, and without."""
    return (*(f"fsdp_{name}" for name in names), *names)


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """The arguments that a framework makes of the section for accelerate's plugin.

    version: of FSDP, with the reason. state_dict_type: empty for the plugin's default. vllm: whether TRL syncs to vLLM.
    """

    version: FsdpVersion
    version_why: Setting | str
    offload: OffloadChoice
    backend: Chosen
    sharding: Chosen = dataclasses.field(default_factory=lambda: Chosen("full"))
    model: Chosen = dataclasses.field(default_factory=lambda: Chosen("qwen3"))
    state_dict_type: str = ""
    vllm: bool = False


def use_of_section(settings: Settings, plugin: Plugin, versions: str) -> Use:
    strategy = Chosen("fsdp2", plugin.version_why)
    if plugin.version == 1:
        orig = settings.first(*keys("use_orig_params"))
        is_flat = not settings.flag(*keys("use_orig_params"), default=True)
        why = f"{plugin.version_why}; {orig or 'use_orig_params=true is the default'}"
        strategy = Chosen("fsdp1" if is_flat else "fsdp1-orig", why)
    chosen: dict[AxisName, Chosen] = {
        "strategy": strategy,
        "offload": plugin.offload.chosen,
        "backend": plugin.backend,
        "sharding": plugin.sharding,
        "model": plugin.model,
    }
    return use_of("model", versions, chosen, lambda scenario: _extraction_points(scenario, plugin))


def fsdp_version(settings: Settings, *, default: FsdpVersion, also: Keys = ()) -> FsdpVersion:
    """The version of FSDP. also: keys that go before those of the section. Raises UsageError for one that is none."""
    row = settings.first(*also, *keys("version"))
    if row is None:
        return default
    if str(row.value) not in _VERSIONS:
        raise UsageError(f"{row}: the version of FSDP in fsdp_config must be 1 or 2")
    return _VERSIONS[str(row.value)]


def state_dict_type(settings: Settings, default: str = "") -> str:
    return settings.word(*keys("state_dict_type"), default=default).upper()


def _extraction_points(scenario: Scenario, plugin: Plugin) -> Iterator[ExtractionPoint]:
    """The reads of Accelerator.get_state_dict, save_fsdp_model and TRL's sync_weights, and the loads of load_state."""
    version = plugin.version
    saved = version, plugin.state_dict_type or _DEFAULT_STATE_DICT_TYPE[version]
    yield extraction("whole model (get_state_dict)", scenario, _WHOLE[version])
    if saved in _CHECKPOINT:
        yield extraction("checkpoint (save_state)", scenario, _CHECKPOINT[saved])
    if plugin.vllm:
        yield extraction("weights for vLLM (TRL)", scenario, _SYNC[version])
    for path in _RESUME.get(saved, ()):
        yield loading("resume (load_state)", scenario, path)


def find_version_conflicts(settings: Settings, fsdp_versions: Mapping[str, FsdpVersion]) -> list[ConfigFinding]:
    """Keys of the other version of FSDP, each with the versions of the framework for which it is the other one.

    fsdp_versions: the version of FSDP by the versions of the framework, which are empty where all do the same.
    """
    return [
        dataclasses.replace(
            finding,
            holds_for=tuple(f"model, {label}" for label, same in fsdp_versions.items() if same == version and label),
        )
        for version in dict.fromkeys(fsdp_versions.values())
        for finding in _find_keys_of_other_version(settings, version)
    ]


def _find_keys_of_other_version(settings: Settings, version: FsdpVersion) -> Iterator[ConfigFinding]:
    """As FullyShardedDataParallelPlugin.__post_init__ treats them."""
    reshard = settings.first(*keys("reshard_after_forward"))
    if version == 1:
        if reshard and isinstance(reshard.value, bool):
            sentence = "reshard_after_forward belongs to fsdp_version 2; use sharding_strategy with version 1"
            yield conflict(sentence, reshard)
        return
    if rows := [row for name in _VERSION_1_ONLY if (row := settings.first(*keys(name)))]:
        yield conflict("fsdp_version 2 does not read these settings, which belong to version 1", *rows)
    local = settings.first(*keys("state_dict_type"))
    if local and str(local.value).upper() == "LOCAL_STATE_DICT":
        yield conflict("accelerate rejects LOCAL_STATE_DICT with fsdp_version 2", local)
    if reshard and str(reshard.value).lower() not in ("true", "false"):
        yield conflict("reshard_after_forward must be true or false with fsdp_version 2", reshard)
