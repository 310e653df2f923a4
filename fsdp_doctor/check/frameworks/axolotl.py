"""axolotl: ``fsdp``, ``fsdp_config`` and ``fsdp_version`` of its YAML.

Read in axolotl at v0.4.0, v0.7.1 to v0.18.0: utils/schemas (fsdp.py, validation.py) for the keys and their older names,
utils/trainer.py (setup_fsdp_envs) for the environment that accelerate reads, core/builders/base.py for what the Trainer
gets; requirements.txt for accelerate, which is 1.7 or newer, and so has gloo beside NCCL, since v0.10.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_doctor.check.configured_model import ConfiguredModel
from fsdp_doctor.check.frameworks import fsdp_section
from fsdp_doctor.check.frameworks.framework import (
    Framework,
    Given,
    ModelReading,
    VersionRange,
    get_if_true,
    load_known_keys,
    matching,
    not_under_fsdp,
)
from fsdp_doctor.check.frameworks.fsdp_section import SECTION, FsdpVersion, Plugin, keys
from fsdp_doctor.check.launch_commands import PROGRAM, SCRIPT
from fsdp_doctor.check.settings import Settings, Unreadable
from fsdp_doctor.check.use import Chosen, OffloadChoice, Role, Use
from fsdp_doctor.matrix.axes import Backend, Sharding

_VERSION = ("fsdp_version",)
_SHARDING: dict[str, Sharding] = {
    "HYBRID_SHARD": Sharding.HSDP,
    "HYBRID_SHARD_ZERO2": Sharding.HSDP,
    "NO_SHARD": Sharding.SIZE1,
}
_LORA = ("lora", "qlora")
# Keys that no other framework has beside base_model.
_AXOLOTL_KEYS = (
    *("datasets", "sequence_len", "micro_batch_size", "adapter", "special_tokens", "sample_packing", "rl", "plugins"),
    *("val_set_size", "dataset_prepared_path", "tokenizer_type", "model_type", "lora_r", "chat_template"),
)


@dataclass(frozen=True)
class _Versions(VersionRange):
    """backend: of the process group with the offload. reads_version: whether fsdp_version is read."""

    backend: Backend
    reads_version: bool = True

    def fsdp_version(self, settings: Settings) -> FsdpVersion:
        return fsdp_section.fsdp_version(settings, default=1, also=_VERSION) if self.reads_version else 1


_VERSIONS = (
    _Versions("before v0.9", "<0.9", Backend.DEVICE_ONLY, reads_version=False),
    _Versions("v0.9", ">=0.9,<0.10", Backend.DEVICE_ONLY),
    _Versions("since v0.10", ">=0.10", Backend.MIXED),
)


class Axolotl(Framework):
    name = "axolotl"
    read_in = "v0.4.0 to v0.18.0"
    distributions = ("axolotl",)
    keys = fsdp_section.with_prefix((*load_known_keys("plugin"), "final_state_dict_type", "cpu_offload_pin_memory"))

    def recognizes(self, settings: Settings) -> bool:
        return (
            ("base_model" in settings and any(key in settings for key in _AXOLOTL_KEYS))
            or settings.text(PROGRAM) == "axolotl"
            or settings.text(SCRIPT).startswith("axolotl.")
        )

    def world_size(self, settings: Settings) -> int | None:
        """As the command tells its launcher: accelerate the ranks of all nodes, torchrun those of each."""
        per_node = settings.count("nproc_per_node")
        return settings.number("num_processes") or (per_node and per_node * (settings.count("nnodes") or 1))

    def models(self, settings: Settings, given: Given) -> dict[Role, tuple[str, ...]]:
        return {"model": (SECTION,) if settings.first("fsdp") is not None or settings.below(SECTION) else ()}

    def read(self, role: Role, settings: Settings, given: Given) -> ModelReading:
        options = _read_options(settings)
        if "base_model" not in settings:
            raise Unreadable("the command's configuration is not here; give that file beside")
        if not options and not settings.below(SECTION):
            return not_under_fsdp(role, settings.first("deepspeed") or "neither fsdp nor fsdp_config is set")
        ranges = matching(_VERSIONS, given.framework_version)
        fsdp_versions = {versions.label: versions.fsdp_version(settings) for versions in ranges}
        return ModelReading(
            uses=[_read_use(settings, options, versions) for versions in ranges],
            model=ConfiguredModel(path=settings.first("base_model"), ranks=given.world_size),
            findings=fsdp_section.find_version_conflicts(settings, fsdp_versions),
        )


def _read_options(settings: Settings) -> list[str]:
    row = settings.first("fsdp")
    if row is None or row.value in (False, True):
        return []
    return [str(word) for word in row.value] if isinstance(row.value, list) else str(row.value).split()


def _read_use(settings: Settings, options: list[str], versions: _Versions) -> Use:
    version = versions.fsdp_version(settings)
    offload = OffloadChoice(
        policy=get_if_true(settings, *keys("offload_params"))
        or (settings.first("fsdp") if "offload" in options else None),
        default=settings.first(*keys("offload_params")) or "offload_params=false is the default",
    )
    plugin = Plugin(
        version=version,
        version_why=settings.first(*_VERSION, *keys("version")) or "fsdp_version=1 is the default",
        offload=offload,
        backend=Chosen(
            versions.backend if offload.policy else "device-only",
            "accelerate makes gloo beside NCCL for the offload since 1.7, which axolotl has since v0.10",
        ),
        sharding=_sharding(settings, options, version),
        model=Chosen("qwen3-lora" if settings.text("adapter") in _LORA else "qwen3", settings.first("adapter")),
        state_dict_type=fsdp_section.state_dict_type(settings),
        vllm=settings.flag("trl.use_vllm"),
    )
    return fsdp_section.use_of_section(settings, plugin, versions.label)


def _sharding(settings: Settings, options: list[str], version: FsdpVersion) -> Chosen:
    if version == 2:
        has_replicas = (settings.number("dp_replicate_size") or 1) > 1
        return Chosen("hsdp", settings.first("dp_replicate_size")) if has_replicas else Chosen("full")
    row = settings.first(*keys("sharding_strategy"))
    word = str(row.value) if row else next((option for option in options if option.upper() in _SHARDING), "")
    sharding = _SHARDING.get(word.upper(), "full")
    return Chosen(sharding, (row or settings.first("fsdp")) if sharding != "full" else None)
