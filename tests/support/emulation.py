"""Tells whether this machine can have the emulated device, which needs torch 2.10 and a C++ compiler."""

from __future__ import annotations

import functools

import pytest


def needs_emulation() -> None:
    """Skips the test, with the reason, if the device cannot be built."""
    if reason := _missing():
        pytest.skip(reason)


@functools.cache
def _missing() -> str:
    try:
        import fsdp_doctor.emulated  # noqa: F401, which builds and registers the device
    except ImportError as error:
        return str(error)
    return ""
