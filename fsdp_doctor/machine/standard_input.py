"""Standard input, for what reads ``-``."""

from __future__ import annotations

import sys
from typing import BinaryIO

from fsdp_doctor.errors import UsageError


def standard_input() -> BinaryIO:
    """Its bytes. Raises UsageError where there is none, as after ``<&-``."""
    if sys.stdin is None:
        raise UsageError("standard input is closed; give a file instead of -")
    return sys.stdin.buffer
