"""What a configuration amounts to: the uses of FSDP in it, what is extracted where, and what was found."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fsdp_doctor.check.settings import Setting
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.cases import Case, Scenario

FindingKind = Literal["conflict", "known", "unknown", "note"]
_NEWEST = (1 << 20,)


@dataclass(frozen=True, kw_only=True)
class ExtractionPoint:
    """A place where a framework takes the weights out, as the case of the matrix that it is."""

    purpose: str
    case: Case


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why an axis has its value: a setting, or what the framework does where none says otherwise."""

    axis: str
    value: str
    because: str

    def __str__(self) -> str:
        return f"{self.axis}={self.value}: {self.because}"


@dataclass(frozen=True, kw_only=True)
class Use:
    """One model of the training run, under one range of the framework's versions.

    role: what the model is for. versions: of the framework, empty where all that are known do the same.
    scenario: without staging, which is a matter of each extraction; None where the model is not under FSDP,
        or it cannot be said, and ``why_not`` says so.
    """

    role: str
    versions: str = ""
    scenario: Scenario | None = None
    why_not: str = ""
    reasons: tuple[Reason, ...] = ()
    extractions: tuple[ExtractionPoint, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.role}, {self.versions}" if self.versions else self.role

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(dict.fromkeys(extraction.case for extraction in self.extractions))


@dataclass(frozen=True, kw_only=True)
class ConfigFinding:
    """One sentence, what it rests on, and the cases that show it.

    ``conflict`` and ``known`` are bad; ``unknown`` says what was not understood, ``note`` what to bear in mind.
    entry: the id of the catalogue's entry, for ``known`` alone.
    """

    kind: FindingKind
    sentence: str
    settings: tuple[str, ...] = ()
    entry: str = ""
    cases: tuple[str, ...] = ()

    @property
    def bad(self) -> bool:
        return self.kind in ("conflict", "known")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the module of one framework makes of the settings."""

    uses: tuple[Use, ...]
    findings: tuple[ConfigFinding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the command line says beside the configuration."""

    framework_version: tuple[int, ...] | None = None
    world_size: int | None = None


def version_of(text: str) -> tuple[int, ...]:
    """The numbers of a version, to compare; ``main`` is newer than all. Raises UsageError."""
    if text in ("main", "latest"):
        return _NEWEST
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    if match is None:
        raise UsageError(f"--framework-version {text}: use one like 0.7.1, or main")
    return tuple(int(number) for number in match[1].split("."))


def conflict(sentence: str, *settings: Setting | None) -> ConfigFinding:
    return ConfigFinding(kind="conflict", sentence=sentence, settings=tuple(str(row) for row in settings if row))


def note(sentence: str, *settings: Setting | None) -> ConfigFinding:
    return ConfigFinding(kind="note", sentence=sentence, settings=tuple(str(row) for row in settings if row))


def because(row: Setting | None, default: str) -> str:
    """The setting that decided, or the words for the framework's default."""
    return str(row) if row else default


def merged(uses: Sequence[Use]) -> tuple[Use, ...]:
    """The uses of one role; those that differ in nothing but the versions become one."""
    found: dict[Use, list[str]] = {}
    for use in uses:
        found.setdefault(dataclasses.replace(use, versions=""), []).append(use.versions)
    if len(found) == 1:
        return tuple(found)
    return tuple(dataclasses.replace(use, versions="; ".join(versions)) for use, versions in found.items())
