"""Hugging Face Trainer and TRL: ``fsdp`` and ``fsdp_config`` of TrainingArguments, in JSON or YAML.

Read in transformers' training_args.py at 4.56, 5.0, 5.9, 5.10 and 5.11 (_process_fsdp_args; PR 45640 made FSDP2 the
default), and in accelerate's state.py: TrainingArguments does not set FSDP_OFFLOAD_PARAMS, from which accelerate
takes its CPU backend, so under torchrun the group has NCCL alone unless ``ddp_backend`` says otherwise.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
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
from fsdp_doctor.check.frameworks.fsdp_section import SECTION, FsdpVersion, keys
from fsdp_doctor.check.reading import read as read_file
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.check.use import Use, because, reasons_of
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import AxisName, Sharding
from fsdp_doctor.matrix.cases import Scenario

_OPTIONS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
_SHARDING: dict[str, Sharding] = {"hybrid_shard": "hsdp", "hybrid_shard_zero2": "hsdp", "no_shard": "size1"}
# Keys of accelerate's plugin that `fsdp` sets here.
_IN_OPTIONS = ("offload_params", "sharding_strategy")
_TRAINER_KEYS = ("cpu_offload", "limit_all_gathers", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
_KEYS = fsdp_section.with_prefix((*(key for key in fsdp_section.PLUGIN_KEYS if key not in _IN_OPTIONS), *_TRAINER_KEYS))


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
    return "fsdp" in settings or bool(section and "output_dir" in settings)


def _complete(settings: Settings) -> Settings:
    """``fsdp_config`` may name a JSON file."""
    row = settings.first(SECTION)
    if row is None or not isinstance(row.value, str) or not row.value:
        return settings
    if not pathlib.Path(row.value).is_file():
        raise UsageError(f"{row}: there is no such file")
    inner = read_file([row.value])
    return Settings([*settings, *(Setting(f"{SECTION}.{i.key}", i.value, i.where) for i in inner)])


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
    words = row.value if isinstance(row.value, list) else str(row.value).split()
    for word in words:
        if word not in _OPTIONS:
            raise UsageError(f"{row}: {word!r} is not an option of fsdp; the options are {', '.join(_OPTIONS)}")
    return tuple(words)


def _read(settings: Settings, options: tuple[str, ...], given: Given) -> ModelReading:
    if not options:
        sentence = "TrainingArguments reads fsdp_config only where fsdp is set"
        ignored = [conflict(sentence, row) for row in settings.below(SECTION)[:1]]
        return not_under_fsdp("model", "fsdp is not set", *ignored)
    ranges = in_question(_VERSIONS, given.framework_version)
    uses = [_use(settings, options, versions) for versions in ranges]
    fsdp_versions = dict.fromkeys(versions.fsdp_version(settings) for versions in ranges)
    return ModelReading(
        uses=uses,
        model=ConfiguredModel(path=settings.first("model_name_or_path"), ranks=given.world_size),
        findings=[
            *(found for version in fsdp_versions for found in fsdp_section.version_conflicts(settings, version)),
            *_conflicts(settings, options, ranges),
        ],
    )


def _use(settings: Settings, options: tuple[str, ...], versions: _TransformersVersions) -> Use:
    fsdp_version = versions.fsdp_version(settings)
    fsdp = settings.first("fsdp")
    offload_row = fsdp if "offload" in options else None
    if versions.reads_cpu_offload and settings.flag(*keys("cpu_offload")):
        offload_row = settings.first(*keys("cpu_offload"))
    backend = settings.first("ddp_backend")
    with_cpu = backend is not None and "gloo" in str(backend.value)
    sharding: Sharding = "full"
    if fsdp_version == 1:
        sharding = next((_SHARDING[word] for word in options if word in _SHARDING), "full")
    scenario = Scenario(
        strategy=fsdp_section.strategy_of(settings, fsdp_version),
        offload="policy" if offload_row else "none",
        staging="unstaged",
        backend="mixed" if with_cpu else "device-only",
        sharding=sharding,
    )
    version_row = settings.first(*keys("version")) if versions.reads_version else None
    whys: dict[AxisName, str] = {
        "strategy": because(version_row, f"FSDP{versions.default} is the default"),
        "offload": because(offload_row, f"{fsdp} does not ask for it"),
        "backend": because(backend, "only NCCL under torchrun; accelerate launch sets its own"),
        "sharding": str(fsdp) if sharding != "full" else "",
    }
    state_dict_type = fsdp_section.DEFAULT_STATE_DICT_TYPE[fsdp_version]
    if versions.reads_state_dict_type:
        state_dict_type = fsdp_section.state_dict_type(settings, "FULL_STATE_DICT")
    return Use(
        role="model",
        versions=versions.label,
        scenario=scenario,
        reasons=reasons_of(scenario, whys),
        extractions=fsdp_section.extraction_points(
            scenario, fsdp_version, state_dict_type, vllm=settings.flag("use_vllm")
        ),
    )


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
    refused = ", ".join(word for word in options if word in _SHARDING)
    if refused and any(versions.default == 2 and versions.fsdp_version(settings) == 2 for versions in ranges):
        found.append(say(f"transformers since 5.10 rejects {refused} with FSDP2", settings.first("fsdp")))
    return found


HF_TRAINER = Framework(
    name="Hugging Face Trainer or TRL",
    known_by="fsdp, or fsdp_config beside output_dir",
    recognises=_recognises,
    complete=_complete,
    models=_models,
)
