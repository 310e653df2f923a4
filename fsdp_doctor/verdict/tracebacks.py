"""Exceptions and stacks as text that can leave this machine."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable

from fsdp_doctor.machine.environment import home_as_tilde
from fsdp_doctor.verdict.records import Failure

_FRAMES = 30
_MESSAGE_CHARACTERS = 4_000
_TRACEBACK_CHARACTERS = 16_000


def failure_from(error: BaseException) -> Failure:
    """The exception as values, with the innermost frames of its traceback.

    This does not fail, though any method of an exception of the user's own class can.
    """
    return Failure(
        type=type(error).__name__,
        message=_readable(lambda: home_as_tilde(str(error)[:_MESSAGE_CHARACTERS]), "its message"),
        traceback=_readable(lambda: _traceback(error), "its traceback"),
        time=time.time(),
    )


def _traceback(error: BaseException) -> str:
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-_FRAMES)
    except Exception:
        lines = [*traceback.format_tb(error.__traceback__, limit=-_FRAMES), f"{type(error).__name__}\n"]
    return short("".join(line[:_MESSAGE_CHARACTERS] for line in lines))[-_TRACEBACK_CHARACTERS:]


def _readable(read: Callable[[], str], what: str) -> str:
    """The text; where reading it raises, a sentence that says so. Characters that no file can hold are escaped."""
    try:
        return read().encode(errors="backslashreplace").decode()
    except BaseException as error:
        return f"({what} cannot be read: {type(error).__name__} was raised)"


def short(text: str) -> str:
    """``text`` with each file named as an import would find it: ``torch/distributed/...``, ``fsdp_doctor/...``."""
    for entry in sorted({path.rstrip("/") for path in sys.path if path}, key=len, reverse=True):
        text = text.replace(f'File "{entry}/', 'File "')
    return home_as_tilde(text)
