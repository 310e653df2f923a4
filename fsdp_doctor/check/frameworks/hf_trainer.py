"""Hugging Face Trainer and TRL: ``fsdp`` and ``fsdp_config`` of TrainingArguments, in JSON, YAML or flags.

Read in transformers' training_args.py at 4.46, 4.56, 5.0, 5.9, 5.10, 5.11 and 5.23 (_process_fsdp_args; PR 45640 made
FSDP2 the default), and in accelerate's state.py: TrainingArguments makes the process group before it sets
FSDP_OFFLOAD_PARAMS, from which accelerate takes its CPU backend, so under torchrun the group has NCCL alone unless
``ddp_backend`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_doctor.check.config_files import parse_json
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
    names_gloo,
    not_under_fsdp,
)
from fsdp_doctor.check.frameworks.fsdp_section import SECTION, FsdpVersion, Plugin, keys
from fsdp_doctor.check.launch_commands import SECTION as LAUNCH
from fsdp_doctor.check.reading import follow
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import Chosen, OffloadChoice, Role, Use
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import Sharding

_OPTIONS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
_SHARDING: dict[str, Sharding] = {
    "hybrid_shard": Sharding.HSDP,
    "hybrid_shard_zero2": Sharding.HSDP,
    "no_shard": Sharding.SIZE1,
}
# Keys of the Trainer that no configuration of another framework has together with fsdp_config.
_TRAINER_KEYS = ("output_dir", "per_device_train_batch_size", "num_train_epochs", "gradient_accumulation_steps")


@dataclass(frozen=True)
class _Versions(VersionRange):
    """default: the version of FSDP where the settings do not say one. reads_*: whether that key is read."""

    default: FsdpVersion
    reads_version: bool = True
    reads_cpu_offload: bool = False
    reads_state_dict_type: bool = False

    def fsdp_version(self, settings: Settings) -> FsdpVersion:
        asked = fsdp_section.fsdp_version(settings, default=self.default)
        return asked if self.reads_version else self.default


_VERSIONS = (
    _Versions("transformers before 5.0", "<5", default=1, reads_version=False),
    _Versions("transformers 5.0 to 5.9", ">=5,<5.10", default=1),
    _Versions("transformers since 5.10", ">=5.10", default=2, reads_cpu_offload=True, reads_state_dict_type=True),
)


class HfTrainer(Framework):
    name = "Hugging Face Trainer or TRL"
    read_in = "4.46 to 5.23"
    distributions = ("transformers",)
    keys = fsdp_section.with_prefix(load_known_keys("trainer"))

    def recognizes(self, settings: Settings) -> bool:
        has_section = SECTION in settings or bool(settings.below(SECTION))
        return "fsdp" in settings or (has_section and any(key in settings for key in _TRAINER_KEYS))

    def complete(self, settings: Settings) -> Settings:
        """``fsdp_config`` may be a JSON text, or name a JSON file."""
        row = settings.first(SECTION)
        if row is None or not isinstance(row.value, str) or not row.value:
            return settings
        if "$" in row.value:
            raise Unreadable(f"{row} refers to a value that is not in the configuration")
        if row.value.lstrip().startswith("{"):
            return Settings.joined(settings, _below_section(parse_json(row)))
        named = follow(row)
        if named is None:
            raise UsageError(f"{row}: there is no such file; give it beside, or write fsdp_config out")
        return Settings.joined(settings, _below_section(named))

    def models(self, settings: Settings, given: Given) -> dict[Role, tuple[str, ...]]:
        return {"model": (SECTION,) if _read_options(settings) else ()}

    def read(self, role: Role, settings: Settings, given: Given) -> ModelReading:
        options = _read_options(settings)
        if not options:
            sentence = "TrainingArguments reads fsdp_config only where fsdp is set"
            ignored = [conflict(sentence, row) for row in settings.below(SECTION)[:1]]
            return not_under_fsdp(role, settings.first("deepspeed") or "fsdp is not set", *ignored)
        ranges = matching(_VERSIONS, given.framework_version)
        fsdp_versions = {versions.label: versions.fsdp_version(settings) for versions in ranges}
        return ModelReading(
            uses=[_read_use(settings, options, versions) for versions in ranges],
            model=ConfiguredModel(
                path=settings.first("model_name_or_path", "model_id", "model"), ranks=given.world_size
            ),
            findings=[
                *fsdp_section.find_version_conflicts(settings, fsdp_versions),
                *_conflicts(settings, options, ranges),
            ],
        )


def _below_section(rows: Sequence[Setting] | Settings) -> list[Setting]:
    return [Setting(f"{SECTION}.{row.key}", row.value, row.where) for row in rows]


def _read_options(settings: Settings) -> tuple[str, ...]:
    """The words of ``fsdp``. Raises UsageError for one that TrainingArguments does not have."""
    row = settings.first("fsdp")
    if row is None or row.value is False:
        return ()
    if row.value is True:
        return ("full_shard",)
    if "$" in str(row.value):
        raise Unreadable(f"{row} refers to a value that is not in the configuration")
    words = row.value if isinstance(row.value, list) else str(row.value).split()
    for word in words:
        if word not in _OPTIONS:
            raise UsageError(f"{row}: {word!r} is not an option of fsdp; the options are {', '.join(_OPTIONS)}")
    return tuple(words)


def _read_use(settings: Settings, options: tuple[str, ...], versions: _Versions) -> Use:
    version = versions.fsdp_version(settings)
    fsdp, backend = settings.first("fsdp"), settings.first("ddp_backend")
    policy = fsdp if "offload" in options else None
    if versions.reads_cpu_offload:
        policy = get_if_true(settings, *keys("cpu_offload")) or policy
    sharding: Sharding = Sharding.FULL
    if version == 1:
        sharding = next((_SHARDING[word] for word in options if word in _SHARDING), Sharding.FULL)
    plugin = Plugin(
        version=version,
        version_why=(settings.first(*keys("version")) if versions.reads_version else None)
        or f"FSDP{versions.default} is the default",
        offload=OffloadChoice(policy=policy, default=f"{fsdp} does not ask for it"),
        backend=Chosen(
            "mixed" if backend and names_gloo(str(backend.value)) else "device-only",
            backend or "only NCCL under torchrun; accelerate launch sets its own",
        ),
        sharding=Chosen(sharding, fsdp if sharding != "full" else None),
        state_dict_type=(
            fsdp_section.state_dict_type(settings, "FULL_STATE_DICT") if versions.reads_state_dict_type else ""
        ),
        vllm=settings.flag("use_vllm"),
    )
    return fsdp_section.use_of_section(settings, plugin, versions.label)


def _conflicts(settings: Settings, options: tuple[str, ...], ranges: Sequence[_Versions]) -> Iterator[ConfigFinding]:
    """Settings that versions in question ignore or refuse; where the version is not known, these are notes."""
    finding = conflict if len(ranges) == 1 else note
    version = settings.first(*keys("version"))
    if version and any(not versions.reads_version for versions in ranges):
        yield finding("transformers before 5.0 ignores the version in fsdp_config and always uses FSDP1", version)
    offload = get_if_true(settings, *keys("cpu_offload")) if "offload" not in options else None
    if offload and any(not versions.reads_cpu_offload for versions in ranges):
        yield finding("transformers before 5.10 ignores cpu_offload; put `offload` into fsdp there", offload)
    ignored = get_if_true(settings, *keys("offload_params"))
    if ignored and "offload" not in options and not offload:
        yield conflict("offload_params is accelerate's name, which TrainingArguments does not read", ignored)
    refused = ", ".join(word for word in options if word in _SHARDING)
    if refused and any(versions.default == 2 and versions.fsdp_version(settings) == 2 for versions in ranges):
        yield finding(f"transformers since 5.10 rejects {refused} with FSDP2", settings.first("fsdp"))
    deepspeed = settings.first("deepspeed", f"{LAUNCH}.deepspeed")
    if deepspeed and deepspeed.value:
        yield conflict("fsdp and deepspeed are both set; TrainingArguments takes one of them", deepspeed)
