"""What ``check`` has to know of a framework, and what a framework says of each model that it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from fsdp_doctor.check.config_findings import ConfigFinding
from fsdp_doctor.check.configured_model import ConfiguredModel
from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.check.use import Role, Use
from fsdp_doctor.errors import UsageError

# Of a checkout of the main branch: newer than every release.
_NEWEST = Version("9999")


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

    known_by: the settings by which ``recognises`` knows its configuration, in words.
    models: the models of the run, each with the settings that are its own.
    complete: adds the settings of files that a setting names.
    world_size: as the settings say it, or the framework's default.
    findings: on the configuration as a whole.
    """

    name: str
    known_by: str
    recognises: Callable[[Settings], bool]
    models: Callable[[Settings, Given], Sequence[ModelSettings]]
    complete: Callable[[Settings], Settings] = _unchanged
    world_size: Callable[[Settings], int | None] = _no_world_size
    findings: Callable[[Settings], Sequence[ConfigFinding]] = _no_findings


def not_under_fsdp(role: Role, why: Setting | str | None, *findings: ConfigFinding) -> ModelReading:
    """Of a model that another engine or wrapper trains. why: the setting that says so, or words."""
    return ModelReading(uses=(Use(role=role, why_not=f"not under FSDP: {why}"),), findings=findings)


def version_of(text: str) -> Version:
    """The version of ``--framework-version``. Raises UsageError."""
    if text in ("main", "latest"):
        return _NEWEST
    try:
        return Version(text)
    except InvalidVersion:
        raise UsageError(f"--framework-version {text}: this is not a version; use one like 0.7.1, or main") from None


def in_question(ranges: Sequence[VersionRangeT], version: Version | None) -> list[VersionRangeT]:
    """The ranges that have the version, a pre-release being what it leads to; all of them where none is given."""
    return [one for one in ranges if version is None or one.versions.contains(version.base_version)]
