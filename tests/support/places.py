"""Places of the checkout."""

from __future__ import annotations

import pathlib

TESTS = pathlib.Path(__file__).resolve().parents[1]
ROOT = TESTS.parent

# The variable that names what the processes of one run of the tests share.
SHARED_DIRECTORY = "FSDP_DOCTOR_TESTS_SHARED"
