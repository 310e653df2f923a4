"""Writes files and the standard streams, even if a stream is closed, is on a full disk, or is no longer read."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from fsdp_doctor.errors import DoctorFault, OutputClosed, UsageError


def check_writable(file: pathlib.Path) -> None:
    """Raises UsageError if the file cannot be written. Leaves the file system unchanged."""
    existed = file.exists()
    try:
        with open(file, "a"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from None


def write(output: pathlib.Path | None, text: str) -> None:
    """Writes ``text`` to the file, or to standard output if ``output`` is None.

    Raises UsageError or DoctorFault if the file cannot be written.
    """
    if output is None:
        replace_unprintable("replace")
        sys.stdout.write(text)
        return
    check_writable(output)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DoctorFault(f"cannot write {output}: {error.strerror or error}") from None


def replace_unprintable(errors: str) -> None:
    """Makes standard output replace characters that its encoding lacks.

    errors: the name of an error handler of ``codecs``, which makes the replacement.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=errors)


def prepare_streams() -> None:
    """Makes errors of standard output raise this program's exceptions, and ignores errors of standard error.

    A closed descriptor is opened again in the wrong direction, so that its use fails as before. Otherwise the next file
    to be opened would get the descriptor's number, and receive the program's output. Streams that a caller of ``main``
    has put into ``sys`` are left unchanged.
    """
    for descriptor, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            # Gets the lowest free number, which is this one.
            os.open(os.devnull, flags)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _Output(**_read_settings(sys.stdout, 1))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _Messages(**_read_settings(sys.stderr, 2))


class _Output(io.TextIOWrapper):
    """Standard output.

    A write that fails raises OutputClosed if the reader has closed the pipe, otherwise DoctorFault.
    """

    def write(self, text: str) -> int:
        with self._raise_own_errors():
            return super().write(text)

    def flush(self) -> None:
        with self._raise_own_errors():
            super().flush()

    @contextlib.contextmanager
    def _raise_own_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # The interpreter flushes what is left in the buffer when it exits, and would complain a second time.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if isinstance(error, BrokenPipeError):
                raise OutputClosed("standard output was closed by the program that read it") from None
            raise DoctorFault(f"cannot write to standard output: {error.strerror or error}") from None


class _Messages(io.TextIOWrapper):
    """Standard error. A message that cannot be written is lost, and does not change the exit code."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def _read_settings(stream: Any, descriptor: int) -> dict[str, Any]:
    """Returns the settings of Python's stream, or Python's default settings if the stream is closed."""
    is_error = descriptor == 2
    return {
        "buffer": open(descriptor, "wb", closefd=False),
        "encoding": stream.encoding if stream is not None else "utf-8",
        "errors": "backslashreplace" if is_error else "strict" if stream is None else stream.errors,
        "line_buffering": is_error or (stream is not None and stream.line_buffering),
        "write_through": stream is not None and stream.write_through,
    }
