"""The versions that a configuration is checked for: given, or installed here, or all that are known."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from packaging.version import InvalidVersion, Version

VersionSource: TypeAlias = Literal["given", "installed here", "not known"]


@dataclass(frozen=True, kw_only=True)
class CheckedVersion:
    """of: a distribution. version: None where every version is in question."""

    of: str
    version: Version | None = None
    source: VersionSource = "not known"

    def __str__(self) -> str:
        return f"{self.of} {self.version}, {self.source}" if self.version else f"every version of {self.of}"


def installed(distributions: Sequence[str]) -> CheckedVersion:
    """That of the first of the distributions that is here."""
    for distribution in distributions:
        try:
            version = Version(importlib.metadata.version(distribution))
        except (importlib.metadata.PackageNotFoundError, InvalidVersion):
            continue
        return CheckedVersion(of=distribution, version=version, source="installed here")
    return CheckedVersion(of=distributions[0])
