"""Reads a file, a named pipe or standard input.

A wait for data is announced after a second, and given up after a minute.
"""

from __future__ import annotations

import os
import pathlib
import select
import stat
import sys
from collections.abc import Iterator

from fsdp_doctor.errors import UsageError

_MESSAGE_AFTER_S = 1.0
_GIVE_UP_AFTER_S = 60.0


def read_parts(path: pathlib.Path | None, *, size: int = 1 << 20, patient: bool = False) -> Iterator[bytes]:
    """Yields the content in parts of at most ``size`` bytes. ``None`` means standard input.

    Raises OSError, and UsageError if standard input is closed or the input is given up.

    patient: whether to wait without limit for standard input or a device. A named pipe is given up after a minute
        without data in any case.
    """
    name = "standard input" if path is None else str(path)
    if path is None:
        if sys.stdin is None:
            raise UsageError("standard input is closed; give a file instead of -")
        try:
            descriptor = os.dup(sys.stdin.fileno())
        except OSError:  # A caller may have replaced standard input by a stream in memory.
            yield from iter(lambda: sys.stdin.buffer.read(size), b"")
            return
    else:
        # Without O_NONBLOCK, opening a pipe without a writer would wait for one.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        is_patient = patient and not (path is not None and stat.S_ISFIFO(mode))
        while part := _read_part(descriptor, name, size, waits=not stat.S_ISREG(mode), is_patient=is_patient):
            yield part
    finally:
        os.close(descriptor)


def _read_part(descriptor: int, name: str, size: int, *, waits: bool, is_patient: bool) -> bytes:
    if waits:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(_MESSAGE_AFTER_S * 1000):
            waiting = f"fsdp-doctor: waiting for {name}, but nothing is written to it"
            print(waiting, file=sys.stderr, flush=True)  # noqa: T201, a silent minute would look like a hang
            if not poll.poll(None if is_patient else (_GIVE_UP_AFTER_S - _MESSAGE_AFTER_S) * 1000):
                raise UsageError(f"cannot read {name}: nothing was written to it for {_GIVE_UP_AFTER_S:.0f} s")
    return os.read(descriptor, size)
