"""What ``check`` has to know of a framework, and what a framework says of each model that it runs.

A framework is a module with one table of keys for each model, the versions that differ, and the source of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from fsdp_doctor.check.config_findings import ConfigFinding
from fsdp_doctor.check.configured_model import ConfiguredModel
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import Chosen, Role, Use
from fsdp_doctor.errors import UsageError

# Of a checkout of the main branch: newer than every release.
_NEWEST = Version("9999")
ALL_VERSIONS = "all"

# Keys that mean the same, in newer and older layouts: the first that is set counts.
Keys: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Given:
    """What is known beside the settings. world_size: the number of ranks, None where nothing says it."""

    framework_version: Version | None = None
    world_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class VersionRange:
    """Versions of a framework that do the same with a configuration. label: as the user reads it."""

    label: str
    versions: SpecifierSet


VersionRangeT = TypeVar("VersionRangeT", bound=VersionRange)


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """Where the settings of one model stand: for each question the keys that answer it.

    policy: whether it is under the policy. param_offload, optimizer_offload: whether the framework moves them.
    replicas: how many times it is replicated, in ranks. shard_group: in how many ranks it is sharded; a negative number
    is all. lora_rank: positive with an adapter. path: of the model.
    """

    policy: Keys = ()
    param_offload: Keys = ()
    optimizer_offload: Keys = ()
    replicas: Keys = ()
    shard_group: Keys = ()
    lora_rank: Keys = ()
    path: Keys = ()

    def offload(self, settings: Settings, default: str) -> Chosen:
        """The policy if it is asked for, else the manual offloads that are."""
        policy = settings.first(*self.policy)
        if settings.flag(*self.policy):
            return Chosen("policy", policy)
        on = {
            word: settings.first(*keys)
            for word, keys in (("param", self.param_offload), ("optimizer", self.optimizer_offload))
            if settings.flag(*keys)
        }
        return Chosen("+".join(on) or "none", "; ".join(map(str, on.values())) or str(policy or default))

    def sharding(self, settings: Settings, world_size: int | None) -> Chosen:
        replicas, group = settings.number(*self.replicas) or 1, self._shard_group(settings)
        row = settings.first(*self.replicas) or settings.first(*self.shard_group)
        if world_size and 0 < group < world_size:
            return Chosen("size1" if group == 1 else "hsdp", f"{row} of {world_size} ranks")
        return Chosen("hsdp", row) if replicas > 1 else Chosen("full")

    def _shard_group(self, settings: Settings) -> int:
        """Raises Unreadable for 0, by which verl and SkyRL divide (create_device_mesh); torchtune asserts 1."""
        size = settings.number(*self.shard_group, default=-1)
        if size == 0:
            raise Unreadable(
                f"{settings.first(*self.shard_group)} is a group of no ranks, and the job fails; all are -1"
            )
        return -1 if size is None else size

    def model(self, settings: Settings) -> Chosen:
        rank = settings.first(*self.lora_rank)
        return Chosen("qwen3-lora", rank) if (settings.number(*self.lora_rank) or 0) > 0 else Chosen("qwen3")

    def configured_model(self, settings: Settings, world_size: int | None) -> ConfiguredModel:
        return ConfiguredModel(path=settings.first(*self.path), ranks=self._ranks_of_a_group(settings, world_size))

    def _ranks_of_a_group(self, settings: Settings, world_size: int | None) -> int | None:
        size = self._shard_group(settings)
        if world_size is None or 0 < size < world_size:
            return world_size and size
        return max(1, world_size // (settings.number(*self.replicas) or 1))


@dataclass(frozen=True, kw_only=True)
class ModelReading:
    """What a framework makes of the settings of one model.

    uses: one for each range of versions in question. model: the one that the settings name, for its dimensions.
    """

    uses: Sequence[Use]
    model: ConfiguredModel = field(default_factory=ConfiguredModel)
    findings: Sequence[ConfigFinding] = ()


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """One model of a run, and its settings.

    sections: where its settings of FSDP stand. keys: all that such a section can have.
    read: raises Unreadable where a setting that decides something cannot be read.
    """

    role: Role
    sections: tuple[str, ...]
    keys: tuple[str, ...]
    read: Callable[[], ModelReading]


def _unchanged(settings: Settings) -> Settings:
    return settings


def _no_world_size(settings: Settings) -> int | None:
    return None


def _no_findings(settings: Settings) -> Sequence[ConfigFinding]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework whose configurations are understood. All of its functions can raise UsageError and Unreadable.

    read_in: the versions of its source that it was read in.
    distributions: its packages; the version of the first that is installed is taken where none is given.
    models: the models of the run, each with the settings that are its own.
    cpu_collectives: whether it runs collectives over shards that the policy keeps on the CPU, as to clip gradients.
    complete: adds the settings of files that a setting names.
    world_size: as the settings say it, or the framework's default; the launch command's where it says none.
    findings: on the configuration as a whole.
    """

    name: str
    read_in: str
    recognises: Callable[[Settings], bool]
    models: Callable[[Settings, Given], Sequence[ModelSettings]]
    distributions: tuple[str, ...] = ()
    cpu_collectives: bool = True
    complete: Callable[[Settings], Settings] = _unchanged
    world_size: Callable[[Settings], int | None] = _no_world_size
    findings: Callable[[Settings], Sequence[ConfigFinding]] = _no_findings


def not_under_fsdp(role: Role, why: Setting | str | None, *findings: ConfigFinding) -> ModelReading:
    """Of a model that another engine or wrapper trains. why: the setting that says so, or words."""
    return ModelReading(uses=(Use(role=role, why_not=f"not under FSDP: {why}"),), findings=findings)


def another_engine(role: Role, why: Setting | str | None) -> list[ModelSettings]:
    """The models of a run that has none under FSDP."""
    return [ModelSettings(role=role, sections=(), keys=(), read=lambda: not_under_fsdp(role, why))]


def version_of(text: str, option: str = "--framework-version") -> Version | None:
    """The version that an option gives; None for all of them. Raises UsageError."""
    if text == ALL_VERSIONS:
        return None
    if text in ("main", "latest"):
        return _NEWEST
    try:
        return Version(text)
    except InvalidVersion:
        raise UsageError(f"{option} {text}: this is not a version; use one like 0.7.1, or main, or all") from None


def in_question(ranges: Sequence[VersionRangeT], version: Version | None) -> list[VersionRangeT]:
    """The ranges that have the version, a pre-release being what it leads to; all of them where none is given."""
    return [one for one in ranges if version is None or one.versions.contains(version.base_version)]
