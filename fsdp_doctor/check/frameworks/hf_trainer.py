"""Hugging Face Trainer and TRL: ``fsdp`` and ``fsdp_config`` of TrainingArguments: JSON, YAML, flags, or Python.

Read in transformers' training_args.py at 4.46, 4.56, 5.0, 5.9, 5.10, 5.11 and 5.23 (_process_fsdp_args; PR 45640 made
FSDP2 the default), and in accelerate's state.py: TrainingArguments makes the process group before it sets
FSDP_OFFLOAD_PARAMS, from which accelerate takes its CPU backend, so under torchrun the group has NCCL alone unless
``ddp_backend`` says otherwise.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from fsdp_doctor.check.config_findings import ConfigFinding, conflict, note
from fsdp_doctor.check.config_formats import flattened
from fsdp_doctor.check.configured_model import ConfiguredModel
from fsdp_doctor.check.frameworks import fsdp_section
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
from fsdp_doctor.check.frameworks.fsdp_section import SECTION, FsdpVersion, Plugin, keys
from fsdp_doctor.check.launch_commands import SECTION as LAUNCH
from fsdp_doctor.check.reading import followed
from fsdp_doctor.check.settings import Expression, Setting, Settings, Unreadable
from fsdp_doctor.check.use import Chosen, Use
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import Sharding

_OPTIONS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
_SHARDING: dict[str, Sharding] = {"hybrid_shard": "hsdp", "hybrid_shard_zero2": "hsdp", "no_shard": "size1"}
# Keys of accelerate's plugin that `fsdp` sets here.
_IN_OPTIONS = ("offload_params", "sharding_strategy")
_TRAINER_KEYS = ("cpu_offload", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
_KEYS = fsdp_section.with_prefix((*(key for key in fsdp_section.PLUGIN_KEYS if key not in _IN_OPTIONS), *_TRAINER_KEYS))
_TABLE = KeyTable(path=("model_name_or_path", "model_id", "model"))
# What a run of the Trainer has beside `fsdp`, and no configuration of another framework has together with that.
_OF_TRAINER = ("output_dir", "per_device_train_batch_size", "num_train_epochs", "gradient_accumulation_steps")


@dataclass(frozen=True, kw_only=True)
class _TransformersVersions(VersionRange):
    """default: the version of FSDP where the settings do not say one. reads_*: whether that key is read."""

    default: FsdpVersion
    reads_version: bool = True
    reads_cpu_offload: bool = False
    reads_state_dict_type: bool = False

    def fsdp_version(self, settings: Settings) -> FsdpVersion:
        asked = fsdp_section.fsdp_version(settings, default=self.default)
        return asked if self.reads_version else self.default


_VERSIONS = (
    _TransformersVersions(label="transformers before 5.0", versions=SpecifierSet("<5"), default=1, reads_version=False),
    _TransformersVersions(label="transformers 5.0 to 5.9", versions=SpecifierSet(">=5,<5.10"), default=1),
    _TransformersVersions(
        label="transformers since 5.10",
        versions=SpecifierSet(">=5.10"),
        default=2,
        reads_cpu_offload=True,
        reads_state_dict_type=True,
    ),
)


def _recognises(settings: Settings) -> bool:
    section = SECTION in settings or settings.below(SECTION)
    return "fsdp" in settings or bool(section and any(key in settings for key in _OF_TRAINER))


def _complete(settings: Settings) -> Settings:
    """``fsdp_config`` may be a JSON text, or name a JSON file."""
    row = settings.first(SECTION)
    if row is None or not isinstance(row.value, str) or not row.value:
        return settings
    if isinstance(row.value, Expression) or "$" in row.value:
        raise Unreadable(f"{row} refers to a value that is not in the configuration")
    if row.value.lstrip().startswith("{"):
        try:
            inner = list(flattened(json.loads(row.value), row.key, lambda _: row.where))
        except (ValueError, RecursionError):
            raise UsageError(f"{row}: this is not JSON") from None
    else:
        found = followed(row)
        if found is None:
            raise UsageError(f"{row}: there is no such file; give it beside, or write fsdp_config out")
        inner = list(found)
    return Settings.joined(settings, [Setting(f"{SECTION}.{i.key}", i.value, i.where) for i in inner])


def _models(settings: Settings, given: Given) -> list[ModelSettings]:
    options = _options(settings.first("fsdp"))
    read = functools.partial(_read, settings, options, given)
    return [ModelSettings(role="model", sections=(SECTION,) if options else (), keys=_KEYS, read=read)]


def _options(row: Setting | None) -> tuple[str, ...]:
    """The words of ``fsdp``. Raises UsageError for one that TrainingArguments does not have."""
    if row is None or row.value is False:
        return ()
    if row.value is True:
        return ("full_shard",)
    if isinstance(row.value, Expression) or "$" in str(row.value):
        raise Unreadable(f"{row} refers to a value that is not in the configuration")
    words = row.value if isinstance(row.value, list) else str(row.value).split()
    for word in words:
        if word not in _OPTIONS:
            raise UsageError(f"{row}: {word!r} is not an option of fsdp; the options are {', '.join(_OPTIONS)}")
    return tuple(words)


def _read(settings: Settings, options: tuple[str, ...], given: Given) -> ModelReading:
    if not options:
        sentence = "TrainingArguments reads fsdp_config only where fsdp is set"
        ignored = [conflict(sentence, row) for row in settings.below(SECTION)[:1]]
        return not_under_fsdp("model", settings.first("deepspeed") or "fsdp is not set", *ignored)
    ranges = in_question(_VERSIONS, given.framework_version)
    fsdp_versions = {versions.label: versions.fsdp_version(settings) for versions in ranges}
    return ModelReading(
        uses=[_use(settings, options, versions) for versions in ranges],
        model=ConfiguredModel(path=settings.first(*_TABLE.path), ranks=given.world_size),
        findings=[
            *fsdp_section.version_conflicts(settings, fsdp_versions),
            *_conflicts(settings, options, ranges),
        ],
    )


def _use(settings: Settings, options: tuple[str, ...], versions: _TransformersVersions) -> Use:
    version = versions.fsdp_version(settings)
    fsdp, backend = settings.first("fsdp"), settings.first("ddp_backend")
    offload = fsdp if "offload" in options else None
    if versions.reads_cpu_offload and settings.flag(*keys("cpu_offload")):
        offload = settings.first(*keys("cpu_offload"))
    sharding: Sharding = "full"
    if version == 1:
        sharding = next((_SHARDING[word] for word in options if word in _SHARDING), "full")
    state_dict_type = fsdp_section.DEFAULT_STATE_DICT_TYPE[version]
    if versions.reads_state_dict_type:
        state_dict_type = fsdp_section.state_dict_type(settings, "FULL_STATE_DICT")
    version_row = settings.first(*keys("version")) if versions.reads_version else None
    plugin = Plugin(
        version=version,
        version_why=version_row or f"FSDP{versions.default} is the default",
        offload=Chosen("policy", offload) if offload else Chosen("none", f"{fsdp} does not ask for it"),
        backend=Chosen(
            "mixed" if backend is not None and "gloo" in str(backend.value) else "device-only",
            backend or "only NCCL under torchrun; accelerate launch sets its own",
        ),
        sharding=Chosen(sharding, fsdp if sharding != "full" else None),
        state_dict_type=state_dict_type,
        vllm=settings.flag("use_vllm"),
    )
    return fsdp_section.use_of_section(settings, plugin, versions.label)


def _conflicts(
    settings: Settings, options: tuple[str, ...], ranges: Sequence[_TransformersVersions]
) -> list[ConfigFinding]:
    """What some of the versions in question ignore or refuse; where the version is not known it is a note."""
    say = conflict if len(ranges) == 1 else note
    found = []
    version = settings.first(*keys("version"))
    if version and any(not versions.reads_version for versions in ranges):
        found.append(say("transformers before 5.0 ignores the version in fsdp_config and always uses FSDP1", version))
    offload = settings.first(*keys("cpu_offload"))
    asked = settings.flag(*keys("cpu_offload")) and "offload" not in options
    if asked and any(not versions.reads_cpu_offload for versions in ranges):
        found.append(say("transformers before 5.10 ignores cpu_offload; put `offload` into fsdp there", offload))
    ignored = settings.first(*keys("offload_params"))
    if ignored and settings.flag(*keys("offload_params")) and "offload" not in options and not asked:
        found.append(conflict("offload_params is accelerate's name, which TrainingArguments does not read", ignored))
    refused = ", ".join(word for word in options if word in _SHARDING)
    if refused and any(versions.default == 2 and versions.fsdp_version(settings) == 2 for versions in ranges):
        found.append(say(f"transformers since 5.10 rejects {refused} with FSDP2", settings.first("fsdp")))
    deepspeed = settings.first("deepspeed", f"{LAUNCH}.deepspeed")
    if deepspeed and deepspeed.value:
        found.append(conflict("fsdp and deepspeed are both set; TrainingArguments takes one of them", deepspeed))
    return found


HF_TRAINER = Framework(
    name="Hugging Face Trainer or TRL",
    read_in="4.46 to 5.23",
    distributions=("transformers",),
    recognises=_recognises,
    complete=_complete,
    models=_models,
)
