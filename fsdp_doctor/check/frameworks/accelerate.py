"""accelerate: ``fsdp_config`` of its YAML, versions 1 and 2, and the flags of ``accelerate launch``.

Read in accelerate at 1.6.0, 1.9.0 and 1.15.0.dev: commands/launch.py and utils/launch.py for what absent keys mean and
which of a flag and a file counts, state.py for the backend (gloo beside NCCL since 1.7.0, PR 3574); what is in
``fsdp_section``.
"""

from __future__ import annotations

import functools
import pathlib
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from fsdp_doctor.check.config_findings import ConfigFinding, conflict, note
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
from fsdp_doctor.check.frameworks.fsdp_section import SECTION, Plugin, keys
from fsdp_doctor.check.launch_commands import SECTION as LAUNCH
from fsdp_doctor.check.python_calls import PLUGIN, called_offload
from fsdp_doctor.check.reading import followed
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import Chosen, Use
from fsdp_doctor.matrix.axes import Backend, Sharding

_KEYS = fsdp_section.with_prefix(fsdp_section.PLUGIN_KEYS)
_REPLICAS = "parallelism_config.parallelism_config_dp_replicate_size"
_CONFIG_FILE = f"{LAUNCH}.config_file"
# Flags of `accelerate launch` that stand for another engine, and the distributed_type that they amount to.
_ENGINES = {
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}
_OTHER_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "MULTI_GPU", "NO", "XLA", "TPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU")
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
    fragment = any(row.key.startswith(f"{SECTION}.fsdp_") for row in settings.below(SECTION))
    of_trainer = "fsdp" in settings or "output_dir" in settings
    launched = settings.first(f"{LAUNCH}.program")
    return (
        "distributed_type" in settings
        or "compute_environment" in settings
        or PLUGIN + ".called" in settings
        or (launched is not None and launched.value == "accelerate" and ("fsdp" not in settings or _asked(settings)))
        or (fragment and not of_trainer)
    )


def _asked(settings: Settings) -> bool:
    return any(f"{LAUNCH}.{flag}" in settings for flag in (*_ENGINES, "config_file"))


def _complete(settings: Settings) -> Settings:
    """With the file that ``--config_file`` names, and with the flags, which go before it."""
    found = Settings.joined(_of_file(settings), settings)
    for flag, engine in _ENGINES.items():
        row = settings.first(f"{LAUNCH}.{flag}")
        if row is not None and settings.flag(row.key):
            found.put(Setting("distributed_type", engine, f"--{flag}, {row.where}"))
    for row in settings.below(LAUNCH):
        name = row.key.rpartition(".")[2]
        if name.startswith("fsdp_"):
            found.put(Setting(f"{SECTION}.{name}", row.value, row.where))
        elif name in ("num_processes", "num_machines"):
            found.put(Setting(name, row.value, row.where))
    if PLUGIN + ".called" in settings:
        found.put(Setting("distributed_type", "FSDP", settings.rows[PLUGIN + ".called"].where))
        for row in settings.below(PLUGIN):
            name = {"cpu_offload": "offload_params"}.get(row.key.rpartition(".")[2], row.key.rpartition(".")[2])
            if name != "called":
                called = called_offload(row.value)
                found.put(Setting(f"{SECTION}.{name}", row.value if called is None else called, row.where))
    return found


def _of_file(settings: Settings) -> Settings:
    """Those of the file; none if it was given beside the command. Raises Unreadable where it is not here."""
    row = settings.first(_CONFIG_FILE)
    if row is None or "distributed_type" in settings:
        return Settings()
    found = followed(row)
    if found is None:
        if any(f"{LAUNCH}.{flag}" in settings for flag in _ENGINES):
            return Settings()
        raise Unreadable(f"{row}: {pathlib.Path(str(row.value)).name} is not here; give that file beside the command")
    return found


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    read = functools.partial(_read, settings, given)
    return [ModelSettings(role="model", sections=(SECTION,), keys=_KEYS, read=read)]


def _read(settings: Settings, given: Given) -> ModelReading:
    launched = settings.first("distributed_type")
    if launched is not None and str(launched.value).upper() != "FSDP":
        if str(launched.value).upper() not in _OTHER_ENGINES:
            raise Unreadable(f"{launched} is not one of accelerate's engines")
        ignored = [row for row in settings.below(SECTION) if row.value is not None][:1]
        sentence = "accelerate reads fsdp_config only with distributed_type=FSDP"
        return not_under_fsdp("model", launched, *(conflict(sentence, launched, row) for row in ignored))
    if launched is None and not settings.below(SECTION):
        raise Unreadable("accelerate launch has neither --use_fsdp nor --config_file, so the default file decides")
    version = fsdp_section.fsdp_version(settings, default=1)
    return ModelReading(
        uses=[_use(settings, versions) for versions in in_question(_VERSIONS, given.framework_version)],
        model=ConfiguredModel(
            path=settings.first("model_name_or_path", "model"),
            ranks=_shard_group(settings, given.world_size),
        ),
        findings=[
            *fsdp_section.version_conflicts(settings, {"": version}),
            *_refused(settings),
            *_trainer_flags(settings),
        ],
    )


def _use(settings: Settings, versions: _AccelerateVersions) -> Use:
    version = fsdp_section.fsdp_version(settings, default=1)
    offload = settings.first(*keys("offload_params"))
    offloads = settings.flag(*keys("offload_params"))
    whole = settings.word(*keys("state_dict_type")).upper() == "FULL_STATE_DICT"
    plugin = Plugin(
        version=version,
        version_why=settings.first(*keys("version")) or "fsdp_version=1 is the default",
        offload=Chosen("policy" if offloads else "none", offload or "fsdp_offload_params=false is the default"),
        backend=Chosen(
            versions.offload_backend if offloads else "mixed" if whole else "device-only",
            "accelerate/state.py: gloo beside NCCL for offload_params since 1.7.0, and for FULL_STATE_DICT",
        ),
        sharding=_sharding(settings),
        state_dict_type=fsdp_section.state_dict_type(settings, fsdp_section.DEFAULT_STATE_DICT_TYPE[version]),
        vllm=settings.flag("use_vllm"),
    )
    return fsdp_section.use_of_section(settings, plugin, versions.label)


def _sharding(settings: Settings) -> Chosen:
    replicas = settings.first(_REPLICAS)
    if replicas is not None and (settings.number(_REPLICAS) or 1) > 1:
        return Chosen("hsdp", replicas)
    row = settings.first(*keys("sharding_strategy"))
    if row is None or fsdp_section.fsdp_version(settings, default=1) == 2:
        return Chosen("full")
    sharding = _SHARDING.get(str(row.value).upper()[:6], "full")
    return Chosen(sharding, row if sharding != "full" else None)


def _refused(settings: Settings) -> list[ConfigFinding]:
    """What ``accelerate launch`` raises over before it starts anything, of a file: a flag is text, and passes."""
    own = settings.first("distributed_type")
    found = [
        conflict(f"accelerate refuses a file with a key that it does not know; {row.key} belongs into fsdp_config", row)
        for row in settings
        if own is not None and row.file == own.file and _is_file(row) and row.key.startswith("fsdp_")
        if "." not in row.key
    ]
    synchronizes, loads = (
        settings.first(*keys("sync_module_states")),
        settings.first(*keys("cpu_ram_efficient_loading")),
    )
    off = synchronizes is not None and synchronizes.value is False and _is_file(synchronizes)
    if synchronizes is not None and off and (loads is None or loads.value is not False):
        sentence = (
            "accelerate launch refuses cpu_ram_efficient_loading, which is on by default, without sync_module_states"
        )
        found.append(conflict(sentence, *([loads] if loads is not None else []), synchronizes))
    return found


def _is_file(row: Setting) -> bool:
    return pathlib.Path(row.file).suffix.lower() in (".yaml", ".yml", ".json")


def _trainer_flags(settings: Settings) -> list[ConfigFinding]:
    """TrainingArguments puts its own values over the environment that ``accelerate launch`` made."""
    row = settings.first("fsdp")
    sentence = "the script's own fsdp goes over what accelerate launch says; leave one of them out"
    return [note(sentence, row)] if row is not None and row.value else []


def _world_size(settings: Settings) -> int | None:
    return settings.number("num_processes")


def _shard_group(settings: Settings, world_size: int | None) -> int | None:
    if world_size is None:
        return None
    machines = settings.number("num_machines", default=1) or 1
    by_sharding = {"full": world_size, "size1": 1, "hsdp": max(1, world_size // machines)}
    return by_sharding[_sharding(settings).value]


ACCELERATE = Framework(
    name="accelerate",
    read_in="1.6.0 to 1.15.0",
    distributions=("accelerate",),
    recognises=_recognises,
    complete=_complete,
    models=_models,
    world_size=_world_size,
)
