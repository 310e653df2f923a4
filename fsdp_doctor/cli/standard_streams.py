"""Standard input, output and error, as they may be: closed, on a full disk, or read by a program that has ended."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from fsdp_doctor.errors import DoctorFault, OutputClosed, UsageError


def prepare() -> None:
    """Makes the three streams behave: what goes wrong with them is one of our errors, or for stderr nothing.

    A descriptor that was closed gets one that cannot be used, because the next file to be opened would get
    its number, and our output with it. The streams are new ones on the same descriptors; what
    ``shutil.get_terminal_size`` and others ask ``sys.__stdout__`` stays true. A stream that a caller of ``main``
    has put in the place of Python's own is left as it is.
    """
    _occupy(0, os.O_WRONLY)
    _occupy(1, os.O_RDONLY)
    _occupy(2, os.O_RDONLY)
    if sys.stdin is None:
        sys.stdin = _ClosedInput()
    if sys.stdout is sys.__stdout__:
        sys.stdout = _Output(**_settings(sys.stdout, 1))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _Messages(**_settings(sys.stderr, 2))


class _ClosedInput(io.TextIOBase):
    """In place of a standard input that is closed: reading it is the user's mistake."""

    def _refuse(self, *_: object) -> NoReturn:
        raise UsageError("standard input is closed; give a file instead of -")

    read = readline = fileno = _refuse
    buffer = property(_refuse)


class _Output(io.TextIOWrapper):
    """Standard output. Raises OutputClosed where nobody reads it any more, DoctorFault where it cannot be written."""

    def write(self, text: str) -> int:
        with self._telling():
            return super().write(text)

    def flush(self) -> None:
        with self._telling():
            super().flush()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._discard_the_rest()
            raise OutputClosed("standard output was closed by the program that read it") from None
        except OSError as error:
            self._discard_the_rest()
            raise DoctorFault(f"cannot write to standard output: {error.strerror or error}") from None

    def _discard_the_rest(self) -> None:
        """The interpreter flushes what is left in the buffer as it ends, and would complain a second time."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)


class _Messages(io.TextIOWrapper):
    """Standard error. A message that cannot be written is lost; the exit code is not."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def _occupy(descriptor: int, flags: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        # The lowest free number, which is this one: those below it are taken.
        os.open(os.devnull, flags)


def _settings(stream: Any, descriptor: int) -> dict[str, Any]:
    """Those of the stream that Python made, or for a closed one Python's own."""
    is_error = descriptor == 2
    return {
        "buffer": open(descriptor, "wb", closefd=False),
        "encoding": stream.encoding if stream is not None else "utf-8",
        "errors": "backslashreplace" if is_error else "strict" if stream is None else stream.errors,
        "line_buffering": is_error or (stream is not None and stream.line_buffering),
        "write_through": stream is not None and stream.write_through,
    }
