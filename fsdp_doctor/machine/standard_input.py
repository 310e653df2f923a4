"""The standard input of a command that reads ``-``."""

from __future__ import annotations

import sys
from typing import BinaryIO

from fsdp_doctor.errors import UsageError


def standard_input() -> BinaryIO:
    """The bytes of the standard input. Raises UsageError where the command was started without one, as by ``<&-``."""
    if sys.stdin is None:
        raise UsageError("cannot read the standard input: it is closed")
    return sys.stdin.buffer
