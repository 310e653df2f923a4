"""Hugging Face Trainer and TRL: ``fsdp`` and ``fsdp_config`` of TrainingArguments, in JSON or YAML.

Read in transformers' training_args.py at 4.56, 5.0, 5.9, 5.10 and 5.11 (_process_fsdp_args; PR 45640 made FSDP2 the
default), and in accelerate's state.py: TrainingArguments does not set FSDP_OFFLOAD_PARAMS, from which accelerate
takes its CPU backend, so under torchrun the group has NCCL alone unless ``ddp_backend`` says otherwise.
"""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

from fsdp_doctor.check import common
from fsdp_doctor.check.frameworks import accelerate
from fsdp_doctor.check.reading import read as read_file
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import (
    ConfigFinding,
    Given,
    Reading,
    Use,
    because,
    conflict,
    merged,
    note,
)
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import Sharding, Strategy
from fsdp_doctor.matrix.cases import Scenario

NAME = "Hugging Face Trainer or TRL"
KNOWN_BY = "fsdp, or fsdp_config beside output_dir"

_OPTIONS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
_SHARDING: dict[str, Sharding] = {"hybrid_shard": "hsdp", "hybrid_shard_zero2": "hsdp", "no_shard": "size1"}
_MORE_KEYS = ("cpu_offload", "limit_all_gathers", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
_KEYS = tuple(key for key in (*accelerate.KEYS, *_MORE_KEYS) if key not in ("offload_params", "sharding_strategy"))


@dataclass(frozen=True, kw_only=True)
class Era:
    """A range of transformers' versions: which FSDP without ``version``, and which keys are read."""

    versions: str
    first: tuple[int, ...]
    end: tuple[int, ...]
    default: int
    reads_version: bool = True
    reads_cpu_offload: bool = False
    reads_state_dict_type: bool = False

    def fsdp_version(self, settings: Settings) -> int:
        asked = accelerate.fsdp_version(settings, default=self.default)
        return asked if self.reads_version else self.default


_ERAS = (
    Era(versions="transformers before 5.0", first=(0,), end=(5,), default=1, reads_version=False),
    Era(versions="transformers 5.0 to 5.9", first=(5,), end=(5, 10), default=1),
    Era(
        versions="transformers since 5.10",
        first=(5, 10),
        end=(1 << 30,),
        default=2,
        reads_cpu_offload=True,
        reads_state_dict_type=True,
    ),
)


def recognises(settings: Settings) -> bool:
    section = accelerate.SECTION in settings or settings.below(accelerate.SECTION)
    return "fsdp" in settings or bool(section and "output_dir" in settings)


def read(settings: Settings, given: Given) -> Reading:
    settings = _with_section_file(settings)
    fsdp = settings.first("fsdp")
    options = _options(fsdp)
    if not options:
        use = Use(role="model", why_not="not under FSDP: fsdp is not set")
        section = settings.below(accelerate.SECTION)[:1]
        ignored = [conflict("TrainingArguments reads fsdp_config only where fsdp is set", row) for row in section]
        return Reading(uses=(use,), findings=tuple(ignored))
    found = common.unknown_keys(settings, accelerate.SECTION, accelerate.with_prefix(_KEYS))
    known = given.framework_version
    eras = [era for era in _ERAS if known is None or era.first <= known < era.end]
    try:
        uses = merged([_use(settings, options, era) for era in eras])
        for version in dict.fromkeys(era.fsdp_version(settings) for era in eras):
            found += accelerate.version_conflicts(settings, version)
        found += _conflicts(settings, options, eras)
        model = common.Model(path=settings.first("model_name_or_path"), ranks=given.world_size)
        uses, more = common.with_dims(uses, model)
    except Unreadable as error:
        use, finding = common.unreadable("model", error)
        return Reading(uses=(use,), findings=(*found, finding))
    return Reading(uses=uses, findings=tuple(dict.fromkeys((*found, *more))))


def _with_section_file(settings: Settings) -> Settings:
    """``fsdp_config`` may name a JSON file, which is read where it is here."""
    row = settings.first(accelerate.SECTION)
    if row is None or not isinstance(row.value, str) or not row.value:
        return settings
    if not pathlib.Path(row.value).is_file():
        raise UsageError(f"{row}: the file that fsdp_config names is not here")
    inner = read_file([row.value])
    return Settings([*settings, *(Setting(f"{accelerate.SECTION}.{i.key}", i.value, i.where) for i in inner)])


def _options(row: Setting | None) -> tuple[str, ...]:
    """The words of ``fsdp``. Raises UsageError for one that TrainingArguments does not have."""
    if row is None or row.value is False:
        return ()
    if row.value is True:
        return ("full_shard",)
    words = row.value if isinstance(row.value, list) else str(row.value).split()
    for word in words:
        if word not in _OPTIONS:
            raise UsageError(f"{row}: {word!r} is none of {', '.join(_OPTIONS)}")
    return tuple(words)


def _use(settings: Settings, options: tuple[str, ...], era: Era) -> Use:
    version = era.fsdp_version(settings)
    fsdp = settings.first("fsdp")
    offload_row = fsdp if "offload" in options else None
    if era.reads_cpu_offload and settings.flag(*accelerate.keys("cpu_offload")):
        offload_row = settings.first(*accelerate.keys("cpu_offload"))
    strategy: Strategy = "fsdp2"
    if version == 1:
        orig = settings.flag(*accelerate.keys("use_orig_params"), default=True)
        strategy = "fsdp1-orig" if orig else "fsdp1"
    backend = settings.first("ddp_backend")
    with_cpu = backend is not None and "gloo" in str(backend.value)
    sharding: Sharding = next((_SHARDING[word] for word in options if word in _SHARDING and version == 1), "full")
    scenario = Scenario(
        strategy=strategy,
        offload="policy" if offload_row else "none",
        staging="unstaged",
        backend="mixed" if with_cpu else "device-only",
        sharding=sharding,
    )
    version_row = settings.first(*accelerate.keys("version")) if era.reads_version else None
    version_why = because(version_row, f"FSDP{era.default} is the default")
    whys = {
        "strategy": version_why,
        "offload": because(offload_row, f"nothing asks for it in {fsdp}"),
        "backend": because(backend, "NCCL alone under torchrun; accelerate launch sets its own"),
        "sharding": str(fsdp) if sharding != "full" else "",
    }
    plugins_own = "FULL_STATE_DICT" if version == 1 else "SHARDED_STATE_DICT"
    asked = settings.word(*accelerate.keys("state_dict_type"), default="FULL_STATE_DICT").upper()
    state_dict_type = asked if era.reads_state_dict_type else plugins_own
    return Use(
        role="model",
        versions=era.versions,
        scenario=scenario,
        reasons=accelerate.reasons_of(scenario, whys),
        extractions=accelerate.extractions(scenario, state_dict_type, vllm=settings.flag("use_vllm")),
    )


def _conflicts(settings: Settings, options: tuple[str, ...], eras: list[Era]) -> list[ConfigFinding]:
    """What some of the versions in question ignore or refuse; where the version is not known it is a note."""
    say = conflict if len(eras) == 1 else note
    found = []
    version = settings.first(*accelerate.keys("version"))
    if version and any(not era.reads_version for era in eras):
        found.append(say("transformers before 5.0 reads no version in fsdp_config: it is FSDP1 there", version))
    offload = settings.first(*accelerate.keys("cpu_offload"))
    asked = settings.flag(*accelerate.keys("cpu_offload")) and "offload" not in options
    if asked and any(not era.reads_cpu_offload for era in eras):
        found.append(say("transformers before 5.10 reads no cpu_offload; there it is `offload` in fsdp", offload))
    refused = ", ".join(word for word in options if word in _SHARDING)
    if refused and any(era.default == 2 and era.fsdp_version(settings) == 2 for era in eras):
        found.append(say(f"transformers since 5.10 refuses {refused} under FSDP2", settings.first("fsdp")))
    return found
