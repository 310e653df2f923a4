"""Exceptions and stacks as text that can leave this machine."""

from __future__ import annotations

import sys
import time
import traceback

from fsdp_doctor.machine.environment import home_as_tilde
from fsdp_doctor.verdict.records import Failure

_FRAMES = 30
_MESSAGE_CHARACTERS = 4_000
_TRACEBACK_CHARACTERS = 16_000


def failure_from(error: BaseException) -> Failure:
    """The exception as values, with the innermost frames of its traceback."""
    lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-_FRAMES)
    return Failure(
        type=type(error).__name__,
        message=home_as_tilde(str(error))[:_MESSAGE_CHARACTERS],
        traceback=short("".join(lines))[-_TRACEBACK_CHARACTERS:],
        time=time.time(),
    )


def short(text: str) -> str:
    """``text`` with each file named as an import would find it: ``torch/distributed/...``, ``fsdp_doctor/...``."""
    for entry in sorted({path.rstrip("/") for path in sys.path if path}, key=len, reverse=True):
        text = text.replace(f'File "{entry}/', 'File "')
    return home_as_tilde(text)
