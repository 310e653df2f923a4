"""axolotl: ``fsdp``, ``fsdp_config`` and ``fsdp_version`` of its YAML.

Read in axolotl at v0.4.0, v0.7.1 to v0.18.0: utils/schemas (fsdp.py, validation.py) for the keys and their older names,
utils/trainer.py (setup_fsdp_envs) for the environment that accelerate reads, core/builders/base.py for what the Trainer
gets; requirements.txt for accelerate, which is 1.7 or newer, and so has gloo beside NCCL, since v0.10.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

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
from fsdp_doctor.check.frameworks.fsdp_section import SECTION, FsdpVersion, Plugin, keys
from fsdp_doctor.check.launch_commands import SECTION as LAUNCH
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import Chosen, Use
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import Backend, Sharding

_KEYS = fsdp_section.with_prefix((*fsdp_section.PLUGIN_KEYS, "final_state_dict_type", "cpu_offload_pin_memory"))
_VERSION = ("fsdp_version", *keys("version"))
_SHARDING: dict[str, Sharding] = {"HYBRID_SHARD": "hsdp", "HYBRID_SHARD_ZERO2": "hsdp", "NO_SHARD": "size1"}
# Names that other configurations do not have beside base_model.
_OWN = (
    *("datasets", "sequence_len", "micro_batch_size", "adapter", "special_tokens", "sample_packing", "rl", "plugins"),
    *("val_set_size", "dataset_prepared_path", "tokenizer_type", "model_type", "lora_r", "chat_template"),
)


@dataclass(frozen=True, kw_only=True)
class _AxolotlVersions(VersionRange):
    """backend: of the process group with the offload. reads_version: whether fsdp_version is read."""

    backend: Backend
    reads_version: bool = True


_VERSIONS = (
    _AxolotlVersions(label="before v0.9", versions=SpecifierSet("<0.9"), backend="device-only", reads_version=False),
    _AxolotlVersions(label="v0.9", versions=SpecifierSet(">=0.9,<0.10"), backend="device-only"),
    _AxolotlVersions(label="since v0.10", versions=SpecifierSet(">=0.10"), backend="mixed"),
)


def _recognises(settings: Settings) -> bool:
    launched = settings.first(f"{LAUNCH}.program")
    script = settings.first(f"{LAUNCH}.script")
    return (
        ("base_model" in settings and any(key in settings for key in _OWN))
        or (launched is not None and launched.value == "axolotl")
        or (script is not None and str(script.value).startswith("axolotl."))
    )


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    asked = settings.first("fsdp") is not None or settings.below(SECTION)
    read = functools.partial(_read, settings, given)
    return [ModelSettings(role="model", sections=(SECTION,) if asked else (), keys=_KEYS, read=read)]


def _read(settings: Settings, given: Given) -> ModelReading:
    options = _options(settings)
    if "base_model" not in settings:
        raise Unreadable("the command's configuration is not here; give that file beside")
    if not options and not settings.below(SECTION):
        return not_under_fsdp("model", settings.first("deepspeed") or "neither fsdp nor fsdp_config is set")
    ranges = in_question(_VERSIONS, given.framework_version)
    fsdp_versions = {versions.label: _fsdp_version(settings, versions) for versions in ranges}
    return ModelReading(
        uses=[_use(settings, options, versions) for versions in ranges],
        model=ConfiguredModel(path=settings.first("base_model"), ranks=given.world_size),
        findings=fsdp_section.version_conflicts(settings, fsdp_versions),
    )


def _options(settings: Settings) -> list[str]:
    row = settings.first("fsdp")
    if row is None or row.value in (False, True):
        return []
    return [str(word) for word in row.value] if isinstance(row.value, list) else str(row.value).split()


def _use(settings: Settings, options: list[str], versions: _AxolotlVersions) -> Use:
    version = _fsdp_version(settings, versions)
    offload = _offload(settings, options)
    adapter = settings.first("adapter")
    plugin = Plugin(
        version=version,
        version_why=settings.first(*_VERSION) or "fsdp_version=1 is the default",
        offload=offload,
        backend=Chosen(
            versions.backend if offload.value == "policy" else "device-only",
            "accelerate makes gloo beside NCCL for the offload since 1.7, which axolotl has since v0.10",
        ),
        sharding=_sharding(settings, options, version),
        model=Chosen("qwen3-lora" if adapter and "lora" in str(adapter.value) else "qwen3", adapter),
        state_dict_type=fsdp_section.state_dict_type(settings, fsdp_section.DEFAULT_STATE_DICT_TYPE[version]),
        vllm=settings.flag("trl.use_vllm"),
    )
    return fsdp_section.use_of_section(settings, plugin, versions.label)


def _fsdp_version(settings: Settings, versions: _AxolotlVersions) -> FsdpVersion:
    row = settings.first(*_VERSION)
    if row is None or not versions.reads_version:
        return 1
    if str(row.value) not in ("1", "2"):
        raise UsageError(f"{row}: the version of FSDP must be 1 or 2")
    return 2 if str(row.value) == "2" else 1


def _offload(settings: Settings, options: list[str]) -> Chosen:
    row: Setting | None = settings.first(*keys("offload_params"))
    if settings.flag(*keys("offload_params")):
        return Chosen("policy", row)
    if "offload" in options:
        return Chosen("policy", settings.first("fsdp"))
    return Chosen("none", row or "offload_params=false is the default")


def _sharding(settings: Settings, options: list[str], version: FsdpVersion) -> Chosen:
    row = settings.first(*keys("sharding_strategy"))
    word = str(row.value) if row else next((option for option in options if option.upper() in _SHARDING), "")
    sharding = _SHARDING.get(word.upper(), "full") if version == 1 else "full"
    replicas = settings.first("dp_replicate_size")
    if version == 2 and (settings.number("dp_replicate_size") or 1) > 1:
        return Chosen("hsdp", replicas)
    return Chosen(sharding, (row or settings.first("fsdp")) if sharding != "full" else None)


def _world_size(settings: Settings) -> int | None:
    """As the command tells its launcher: accelerate the ranks of all nodes, torchrun those of each."""
    per_node = settings.count("nproc_per_node")
    return settings.number("num_processes") or (per_node and per_node * (settings.count("nnodes") or 1))


AXOLOTL = Framework(
    name="axolotl",
    read_in="v0.4.0 to v0.18.0",
    distributions=("axolotl",),
    recognises=_recognises,
    models=_models,
    world_size=_world_size,
)
