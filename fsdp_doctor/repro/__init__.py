"""``fsdp-doctor repro``: a case as one standalone script for an upstream issue, of torch and transformers alone."""

from __future__ import annotations

from fsdp_doctor.repro.expectation import Expectation, expected, reported
from fsdp_doctor.repro.framework_script import framework_script
from fsdp_doctor.repro.script import script

__all__ = ["Expectation", "expected", "framework_script", "reported", "script"]
