"""Standard input, for commands that read ``-``."""

from __future__ import annotations

import sys
from typing import BinaryIO

from fsdp_doctor.errors import UsageError


def standard_input() -> BinaryIO:
    """The stream of its bytes. Raises UsageError if it is closed, as after ``<&-``."""
    if sys.stdin is None:
        raise UsageError("standard input is closed; give a file instead of -")
    return sys.stdin.buffer
