"""Reads and compares versions of installed packages, without importing them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from fsdp_doctor.errors import CannotRun


def require(package: str, oldest: str) -> None:
    """Raises CannotRun if ``package`` is not installed, or is older than ``oldest``."""
    # Imported here, because `fsdp-doctor --help` and `list` need no version.
    import importlib.metadata

    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise CannotRun(f"{package} is not installed; install {package} {oldest} or newer") from None
    if not is_at_least(installed, oldest):
        raise CannotRun(f"{package} {installed} is too old; fsdp-doctor needs {package} {oldest} or newer")


def read_installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Maps the names of the given packages that are installed to their versions."""
    import importlib.metadata

    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def is_at_least(installed: str, oldest: str) -> bool:
    """Returns whether ``installed`` is ``oldest`` or newer.

    Only the release numbers are compared: ``2.10.0a0+git1234`` and ``2.10.0.dev20260101`` count as 2.10.
    """
    from packaging.version import Version

    return Version(installed).release >= Version(oldest).release
