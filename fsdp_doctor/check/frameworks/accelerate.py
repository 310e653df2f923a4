"""accelerate: ``fsdp_config`` of its YAML, versions 1 and 2, and the flags of ``accelerate launch``.

Read in accelerate at 1.6.0, 1.9.0 and 1.15.0.dev: commands/launch.py and utils/launch.py for the defaults and for which
of a flag and a file counts, state.py for the backend (gloo beside NCCL since 1.7.0, PR 3574); and in ``fsdp_section``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_doctor.check.configured_model import ConfiguredModel
from fsdp_doctor.check.findings import ConfigFinding, conflict, note
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
from fsdp_doctor.check.frameworks.fsdp_section import SECTION, Plugin, keys
from fsdp_doctor.check.launch_commands import PROGRAM, SECTION as LAUNCH
from fsdp_doctor.check.reading import follow
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import Chosen, OffloadChoice, Role, Use
from fsdp_doctor.matrix.axes import Backend, Sharding

_REPLICAS = "parallelism_config.parallelism_config_dp_replicate_size"
_CONFIG_FILE = f"{LAUNCH}.config_file"
# Flags of `accelerate launch` that choose an engine, and its distributed_type.
_ENGINES = {
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}
_OTHER_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "MULTI_GPU", "NO", "XLA", "TPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU")
# By the first letters of the name of a torch.distributed.fsdp.ShardingStrategy, or its number.
_SHARDING: dict[str, Sharding] = {
    "HYBRID": Sharding.HSDP,
    "NO_SHA": Sharding.SIZE1,
    "4": Sharding.HSDP,
    "5": Sharding.HSDP,
    "3": Sharding.SIZE1,
}


@dataclass(frozen=True)
class _Versions(VersionRange):
    """offload_backend: of the process group with ``offload_params``."""

    offload_backend: Backend


_VERSIONS = (_Versions("before 1.7.0", "<1.7", Backend.DEVICE_ONLY), _Versions("since 1.7.0", ">=1.7", Backend.MIXED))


class Accelerate(Framework):
    name = "accelerate"
    read_in = "1.6.0 to 1.15.0"
    distributions = ("accelerate",)
    keys = fsdp_section.with_prefix(load_known_keys("plugin"))

    def recognizes(self, settings: Settings) -> bool:
        has_section = any(row.key.startswith(f"{SECTION}.fsdp_") for row in settings.below(SECTION))
        asked = any(f"{LAUNCH}.{flag}" in settings for flag in (*_ENGINES, "config_file"))
        return (
            "distributed_type" in settings
            or "compute_environment" in settings
            or (settings.text(PROGRAM) == "accelerate" and ("fsdp" not in settings or asked))
            or (has_section and "fsdp" not in settings and "output_dir" not in settings)
        )

    def complete(self, settings: Settings) -> Settings:
        """With the file that ``--config_file`` names, and with the flags, which go before it."""
        completed = Settings.joined(_read_config_file(settings), settings)
        for flag, engine in _ENGINES.items():
            row = settings.first(f"{LAUNCH}.{flag}")
            if row is not None and settings.flag(row.key):
                completed.put(Setting("distributed_type", engine, f"--{flag}, {row.where}"))
        for row in settings.below(LAUNCH):
            if row.name.startswith("fsdp_"):
                completed.put(Setting(f"{SECTION}.{row.name}", row.value, row.where))
            elif row.name in ("num_processes", "num_machines"):
                completed.put(Setting(row.name, row.value, row.where))
        return completed

    def world_size(self, settings: Settings) -> int | None:
        return settings.number("num_processes")

    def models(self, settings: Settings, given: Given) -> dict[Role, tuple[str, ...]]:
        return {"model": (SECTION,)}

    def read(self, role: Role, settings: Settings, given: Given) -> ModelReading:
        launched = settings.first("distributed_type")
        if launched is not None and str(launched.value).upper() != "FSDP":
            if str(launched.value).upper() not in _OTHER_ENGINES:
                raise Unreadable(f"{launched} is not one of accelerate's engines")
            ignored = [row for row in settings.below(SECTION) if row.value is not None][:1]
            sentence = "accelerate reads fsdp_config only with distributed_type=FSDP"
            return not_under_fsdp(role, launched, *(conflict(sentence, launched, row) for row in ignored))
        if launched is None and not settings.below(SECTION):
            raise Unreadable("accelerate launch has neither --use_fsdp nor --config_file, so the default file decides")
        version = fsdp_section.fsdp_version(settings, default=1)
        return ModelReading(
            uses=[_read_use(settings, versions) for versions in matching(_VERSIONS, given.framework_version)],
            model=ConfiguredModel(
                path=settings.first("model_name_or_path", "model"), ranks=_shard_group(settings, given.world_size)
            ),
            findings=[
                *fsdp_section.find_version_conflicts(settings, {"": version}),
                *_find_refused_settings(settings),
                *_find_trainer_flags(settings),
            ],
        )


def _read_config_file(settings: Settings) -> Settings:
    """Empty if the file was given beside the command. Raises Unreadable where it is not here."""
    row = settings.first(_CONFIG_FILE)
    if row is None or "distributed_type" in settings:
        return Settings()
    read = follow(row)
    if read is None and not any(f"{LAUNCH}.{flag}" in settings for flag in _ENGINES):
        raise Unreadable(f"{row}: {pathlib.Path(str(row.value)).name} is not here; give that file beside the command")
    return read or Settings()


def _read_use(settings: Settings, versions: _Versions) -> Use:
    version = fsdp_section.fsdp_version(settings, default=1)
    offload = OffloadChoice(
        policy=get_if_true(settings, *keys("offload_params")),
        default=settings.first(*keys("offload_params")) or "fsdp_offload_params=false is the default",
    )
    saves_whole = settings.word(*keys("state_dict_type")).upper() == "FULL_STATE_DICT"
    plugin = Plugin(
        version=version,
        version_why=settings.first(*keys("version")) or "fsdp_version=1 is the default",
        offload=offload,
        backend=Chosen(
            versions.offload_backend if offload.policy else "mixed" if saves_whole else "device-only",
            "accelerate/state.py: gloo beside NCCL for offload_params since 1.7.0, and for FULL_STATE_DICT",
        ),
        sharding=_sharding(settings),
        state_dict_type=fsdp_section.state_dict_type(settings),
        vllm=settings.flag("use_vllm"),
    )
    return fsdp_section.use_of_section(settings, plugin, versions.label)


def _sharding(settings: Settings) -> Chosen:
    if (settings.number(_REPLICAS) or 1) > 1:
        return Chosen("hsdp", settings.first(_REPLICAS))
    row = settings.first(*keys("sharding_strategy"))
    if row is None or fsdp_section.fsdp_version(settings, default=1) == 2:
        return Chosen("full")
    sharding = _SHARDING.get(str(row.value).upper()[:6], "full")
    return Chosen(sharding, row if sharding != "full" else None)


def _shard_group(settings: Settings, world_size: int | None) -> int | None:
    if world_size is None:
        return None
    machines = settings.number("num_machines", default=1) or 1
    by_sharding = {"full": world_size, "size1": 1, "hsdp": max(1, world_size // machines)}
    return by_sharding[_sharding(settings).value]


def _find_refused_settings(settings: Settings) -> Iterator[ConfigFinding]:
    """Settings of a file that ``accelerate launch`` refuses before it starts anything; a flag is text, and passes."""
    engine = settings.first("distributed_type")
    for row in settings:
        misplaced = row.key.startswith("fsdp_") and "." not in row.key and _is_in_file(row)
        if engine is not None and row.file == engine.file and misplaced:
            yield conflict(
                f"accelerate refuses a file with a key that it does not know; move {row.key} into fsdp_config", row
            )
    synchronizes = settings.first(*keys("sync_module_states"))
    loads = settings.first(*keys("cpu_ram_efficient_loading"))
    if synchronizes is None or synchronizes.value is not False or not _is_in_file(synchronizes):
        return
    if loads is None or loads.value is not False:
        sentence = (
            "accelerate launch refuses cpu_ram_efficient_loading, which is on by default, without sync_module_states"
        )
        yield conflict(sentence, loads, synchronizes)


def _is_in_file(row: Setting) -> bool:
    return pathlib.Path(row.file).suffix.lower() in (".yaml", ".yml", ".json")


def _find_trainer_flags(settings: Settings) -> list[ConfigFinding]:
    """TrainingArguments puts its own values over the environment that ``accelerate launch`` made."""
    row = settings.first("fsdp")
    sentence = "the script sets fsdp too, which overrides the settings of accelerate launch; leave one of them out"
    return [note(sentence, row)] if row is not None and row.value else []
