"""``fsdp-doctor repro``: writes a case as one standalone script for an upstream issue, without fsdp-doctor."""

from __future__ import annotations

from fsdp_doctor.repro.expectation import Expectation, find_expected, read_reported
from fsdp_doctor.repro.framework_script import render_framework_script
from fsdp_doctor.repro.minimal import render_minimal
from fsdp_doctor.repro.script import render_script

__all__ = [
    "Expectation",
    "find_expected",
    "read_reported",
    "render_framework_script",
    "render_minimal",
    "render_script",
]
