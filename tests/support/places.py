"""Paths in the checkout."""

from __future__ import annotations

import pathlib

TESTS = pathlib.Path(__file__).resolve().parents[1]
ROOT = TESTS.parent

# The environment variable that names the directory which the processes of one test run share.
SHARED_DIRECTORY = "FSDP_DOCTOR_TESTS_SHARED"
