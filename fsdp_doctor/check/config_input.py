"""The bytes of a CONFIG argument, within bounds: of its size, and of how long it is waited for."""

from __future__ import annotations

import os
import select
import stat
import sys
import time

from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine.standard_input import standard_input

STANDARD_INPUT = "standard input"
_MOST_BYTES = 4 << 20
_MOST_LINES = 100_000
# Seconds: how long nothing comes before it is said, and altogether before it is given up.
_SAID_AFTER = 1.0
_GIVEN_UP_AFTER = 60.0


def text_of(argument: str) -> tuple[str, str]:
    """The name of a file, or of the standard input for ``-``, and its text. Raises UsageError."""
    name = STANDARD_INPUT if argument == "-" else argument
    try:
        data = _bytes(argument, name)
    except (OSError, ValueError, RuntimeError) as error:  # pathlib raises the last for the home of an unknown user.
        said = (error.strerror if isinstance(error, OSError) else None) or error
        form = "CONFIG must be a file, - for standard input, or an override like a.b=value"
        raise UsageError(f"cannot read {name}: {said}; {form}") from None
    return name, _decoded(name, data)


def _bytes(argument: str, name: str) -> bytes:
    """All of it, or one byte more than is allowed."""
    if argument == "-":
        stream = standard_input()
        try:
            descriptor = stream.fileno()
        except OSError:  # A stream in memory, as a caller of `check` may have put in its place.
            return stream.read(_MOST_BYTES + 1)
        return _read(descriptor, name)
    # Without O_NONBLOCK a FIFO that nobody writes to cannot even be opened.
    descriptor = os.open(os.path.expanduser(argument), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return _read(descriptor, name)
    finally:
        os.close(descriptor)


def _read(descriptor: int, name: str) -> bytes:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(_MOST_BYTES + 1)
    parts: list[bytes] = []
    missing = _MOST_BYTES + 1
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    given_up = time.monotonic() + _GIVEN_UP_AFTER
    said = False
    while missing:
        if not poll.poll(_SAID_AFTER * 1000) and not said:
            said = True
            waiting = f"fsdp-doctor: waiting for {name}, to which nothing is written"
            print(waiting, file=sys.stderr, flush=True)  # noqa: T201, a minute without a word would look like a hang
        left = given_up - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise UsageError(f"cannot read {name}: it did not come to an end in {_GIVEN_UP_AFTER:.0f} s")
        part = os.read(descriptor, min(missing, 1 << 16))
        if not part:
            break
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _decoded(name: str, data: bytes) -> str:
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{name} is larger than {_MOST_BYTES >> 20} MiB, too large for a training configuration")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not a text file in UTF-8") from None
    if "\0" in text:
        raise UsageError(f"{name} is not a text file in UTF-8")
    if not text.strip():
        raise UsageError(f"{name} is empty")
    if text.count("\n") > _MOST_LINES:
        raise UsageError(f"{name} has more than {_MOST_LINES:,} lines, too many for a training configuration")
    return text
