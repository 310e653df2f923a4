"""What is installed, against the oldest version that works. Imports nothing of what it asks about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from fsdp_doctor.errors import CannotRun


def require(package: str, oldest: str) -> None:
    """Raises CannotRun where ``package`` is not installed, or is older than ``oldest``."""
    # Imported here: `fsdp-doctor --help` and `list` ask for no version.
    import importlib.metadata

    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise CannotRun(f"{package} is not installed; install {package} {oldest} or newer") from None
    if not at_least(installed, oldest):
        raise CannotRun(f"{package} {installed} is too old; fsdp-doctor needs {package} {oldest} or newer")


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """By name, of those that are installed."""
    import importlib.metadata

    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def at_least(installed: str, oldest: str) -> bool:
    """By the release alone: ``2.10.0a0+git1234`` and ``2.10.0.dev20260101`` have what 2.10 has."""
    from packaging.version import Version

    return Version(installed).release >= Version(oldest).release
