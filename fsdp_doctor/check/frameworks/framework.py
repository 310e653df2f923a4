"""The interface of a framework whose configurations ``check`` understands.

A framework is a module with one `Framework`: its keys, the versions that differ, and the source of both.
"""

from __future__ import annotations

import functools
import importlib.metadata
import pathlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from fsdp_doctor.check.configured_model import ConfiguredModel
from fsdp_doctor.check.findings import ConfigFinding, note
from fsdp_doctor.check.settings import Setting, Settings, Unreadable
from fsdp_doctor.check.use import Because, Chosen, OffloadChoice, Role, Use
from fsdp_doctor.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VersionSource: TypeAlias = Literal["given", "installed here", "not known"]
# The version of a checkout of the main branch: newer than every release.
_NEWEST = Version("9999")


# Keys that mean the same in newer and older layouts: the first that is set counts.
Keys: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CheckedVersion:
    """The version that a configuration is checked for. of: a distribution. version: None for every version."""

    of: str
    version: Version | None = None
    source: VersionSource = "not known"

    def __str__(self) -> str:
        return f"{self.of} {self.version}, {self.source}" if self.version else f"every version of {self.of}"


@dataclass(frozen=True)
class VersionRange:
    """Versions of a framework that do the same with a configuration. label: for the user. versions: a specifier."""

    label: str
    versions: str


VersionRangeT = TypeVar("VersionRangeT", bound=VersionRange)


@dataclass(frozen=True)
class Given:
    """The facts beside the settings. framework_version: None for all. world_size: None where nothing says it."""

    framework_version: Version | None = None
    world_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """The keys of one model's settings.

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

    def offload(self, settings: Settings, default: str) -> OffloadChoice:
        """The policy if it is on, or else the manual offloads that are. default: where no setting says anything."""
        policy = settings.first(*self.policy)
        if settings.flag(*self.policy):
            return OffloadChoice(policy=policy)
        return OffloadChoice(
            param=get_if_true(settings, *self.param_offload),
            optimizer=get_if_true(settings, *self.optimizer_offload),
            default=str(policy or default),
        )

    def sharding(self, settings: Settings, world_size: int | None) -> Chosen:
        replicas, group = settings.number(*self.replicas) or 1, self._shard_group(settings)
        row = settings.first(*self.replicas) or settings.first(*self.shard_group)
        if world_size and 0 < group < world_size:
            return Chosen("size1" if group == 1 else "hsdp", f"{row} of {world_size} ranks")
        return Chosen("hsdp", row) if replicas > 1 else Chosen("full")

    def model(self, settings: Settings) -> Chosen:
        rank = settings.first(*self.lora_rank)
        return Chosen("qwen3-lora", rank) if (settings.number(*self.lora_rank) or 0) > 0 else Chosen("qwen3")

    def configured_model(self, settings: Settings, world_size: int | None) -> ConfiguredModel:
        ranks = self._shard_group(settings)
        if world_size is None:
            return ConfiguredModel(path=settings.first(*self.path))
        if not 0 < ranks < world_size:
            ranks = max(1, world_size // (settings.number(*self.replicas) or 1))
        return ConfiguredModel(path=settings.first(*self.path), ranks=ranks)

    def _shard_group(self, settings: Settings) -> int:
        """Raises Unreadable for 0, by which verl and SkyRL divide (create_device_mesh)."""
        size = settings.number(*self.shard_group, default=-1)
        if size == 0:
            row = settings.first(*self.shard_group)
            raise Unreadable(f"{row} is a group of no ranks, and the job fails; all are -1")
        return -1 if size is None else size


@dataclass(frozen=True, kw_only=True)
class ModelReading:
    """The reading of one model's settings.

    uses: one for each range of versions in question. model: the one that the settings name, for its dimensions.
    """

    uses: Sequence[Use]
    model: ConfiguredModel = field(default_factory=ConfiguredModel)
    findings: Sequence[ConfigFinding] = ()


class Framework(ABC):
    """A framework whose configurations are understood. All of its methods can raise UsageError and Unreadable.

    read_in: the versions of its source that it was read in.
    distributions: its packages; the version of the first that is installed is taken where none is given.
    cpu_collectives: whether it runs collectives over shards that the policy keeps on the CPU, as to clip gradients.
    keys: all that a section of FSDP settings can have.
    """

    name: ClassVar[str]
    read_in: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]] = ()
    cpu_collectives: ClassVar[bool] = True
    keys: ClassVar[Keys] = ()

    @abstractmethod
    def recognizes(self, settings: Settings) -> bool:
        """Whether the settings are a configuration of this framework."""

    @abstractmethod
    def read(self, role: Role, settings: Settings, given: Given) -> ModelReading:
        """The uses of one of the models."""

    def models(self, settings: Settings, given: Given) -> Mapping[Role, tuple[str, ...]]:
        """By role of each model of the run, the sections of its FSDP settings."""
        return {"model": ()}

    def complete(self, settings: Settings) -> Settings:
        """The settings with those of files that a setting names."""
        return settings

    def world_size(self, settings: Settings) -> int | None:
        """The number of ranks by the settings, or the framework's default; None for that of the launch command."""
        return None

    def findings(self, settings: Settings) -> Sequence[ConfigFinding]:
        """Findings on the configuration as a whole."""
        return ()


def not_under_fsdp(role: Role, because: Because, *findings: ConfigFinding) -> ModelReading:
    """The reading of a model that another engine or wrapper trains."""
    return ModelReading(uses=(Use(role=role, why_not=f"not under FSDP: {because}"),), findings=findings)


def get_if_true(settings: Settings, *keys: str) -> Setting | None:
    """The setting of the first of ``keys`` that is set, if it is true."""
    return settings.first(*keys) if settings.flag(*keys) else None


def names_gloo(backend: str) -> bool:
    """Whether a process group's backend, as ``cpu:gloo,cuda:nccl``, has gloo."""
    return "gloo" in [part.rpartition(":")[2].strip() for part in backend.split(",")]


def find_other_parallelisms(settings: Settings, section: str, degrees: Sequence[str]) -> list[ConfigFinding]:
    """A note on the degrees of other parallelisms that are more than 1."""
    rows = [settings.first(f"{section}.{degree}") for degree in degrees]
    others = [row for row in rows if row and (settings.number(row.key) or 1) > 1]
    sentence = "the probe has no other parallelism beside FSDP; these settings are left out of the cases"
    return [note(sentence, *others)] if others else []


def load_known_keys(name: str) -> Keys:
    """The keys that ``keys.toml`` lists under a name."""
    return tuple(_key_lists()[name].split())


@functools.cache
def _key_lists() -> dict[str, str]:
    return tomllib.loads(pathlib.Path(__file__).with_name("keys.toml").read_text(encoding="utf-8"))


def checked_version(option: str, given: str | None, distributions: Sequence[str]) -> CheckedVersion:
    """The version that an option gives, or that of the first of the distributions that is installed.

    Raises UsageError for a text that is not a version.
    """
    if given is not None:
        version = parse_version(given, option)
        return CheckedVersion(of=distributions[0], version=version, source="given" if version else "not known")
    for distribution in distributions:
        try:
            version = Version(importlib.metadata.version(distribution))
        except (importlib.metadata.PackageNotFoundError, InvalidVersion):
            continue
        return CheckedVersion(of=distribution, version=version, source="installed here")
    return CheckedVersion(of=distributions[0])


def parse_version(text: str, option: str = "--framework-version") -> Version | None:
    """The version that an option gives; None for ``all``. Raises UsageError."""
    if text == "all":
        return None
    if text in ("main", "latest"):
        return _NEWEST
    try:
        return Version(text)
    except InvalidVersion:
        raise UsageError(f"{option} {text}: this is not a version; use one like 0.7.1, or main, or all") from None


def matching(ranges: Sequence[VersionRangeT], version: Version | None) -> list[VersionRangeT]:
    """The ranges that contain the version; all of them where none is given. A pre-release counts as its release."""
    if version is None:
        return list(ranges)
    return [item for item in ranges if SpecifierSet(item.versions).contains(version.base_version)]
