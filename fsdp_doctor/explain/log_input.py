"""The bytes of a log: opened, with a limit where there is no end, and taken apart into lines without colours."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import stat
from collections.abc import Iterator
from typing import BinaryIO

from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine.standard_input import standard_input

_CHUNK = 1 << 20
_LONGEST_LINE = 1 << 14
# Of what is no file, and so may have no end.
MOST_OF_A_STREAM = 512 << 20
_MAGIC = (b"\x7fELF", b"\x1f\x8b", b"PK\x03\x04", b"\x89PNG", b"\x80\x02")
# Control characters that no program writes into its log.
_NOT_TEXT = bytes({*range(8), *range(14, 27), *range(28, 32), 127})
# The escape character is often lost where a log was pasted, and its "[36m" stays.
_ANSI = re.compile(
    r"\x1b\[[0-9;?]{0,32}[ -/]{0,8}[@-~]|\x1b\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|\[\d{0,2}(?:;\d{1,3}){0,8}m"
)


def name_of(path: pathlib.Path | None) -> str:
    return str(path) if path is not None else "standard input"


class LogInput:
    """One log; ``None`` is standard input. truncated: whether it was read up to MOST_OF_A_STREAM only."""

    def __init__(self, path: pathlib.Path | None) -> None:
        self.path = path
        self.name = name_of(path)
        self.truncated = False

    def chunks(self) -> Iterator[tuple[str, list[str]]]:
        """(text, its lines) piece by piece, about a mebibyte each.

        Raises UsageError for a file that cannot be read, is empty, or is not text.
        """
        empty = True
        rest = b""
        for data in self._read():
            if empty and _is_binary(data):
                raise UsageError(f"{self.name} is not a text file")
            # A log that was truncated while it was written to has holes of them.
            data = data.replace(b"\0", b"")
            empty = empty and not data.strip()
            whole, rest = _split(rest + data)
            yield _decoded(whole)
        yield _decoded(rest)
        if empty:
            raise UsageError(f"{self.name} is empty")

    def _read(self) -> Iterator[bytes]:
        read = 0
        try:
            with _opened(self.path) as file:
                endless = not stat.S_ISREG(_mode(file))
                while data := file.read(_CHUNK):
                    yield data
                    read += len(data)
                    if endless and read >= MOST_OF_A_STREAM:
                        self.truncated = True
                        return
        except OSError as error:
            raise UsageError(f"cannot read {self.name}: {error.strerror or error}") from None


def _mode(file: BinaryIO) -> int:
    try:
        return os.fstat(file.fileno()).st_mode
    except OSError:
        return stat.S_IFREG  # bytes in memory, which have an end


def _opened(path: pathlib.Path | None) -> contextlib.AbstractContextManager[BinaryIO]:
    return open(path, "rb") if path is not None else contextlib.nullcontext(standard_input())


def _is_binary(data: bytes) -> bool:
    """By its beginning: a known format, a tenth of control characters, or fewer among bytes that are no UTF-8."""
    begin = data[:4096]
    control = len(begin) - len(begin.translate(None, _NOT_TEXT))
    undecodable = begin.decode("utf-8", errors="replace").count("\ufffd")
    return data.startswith(_MAGIC) or 10 * control > len(begin) or (20 * control > len(begin) < 5 * undecodable)


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Whole lines, and the beginning of one that goes on; a line without end is cut."""
    end = data.rfind(b"\n") + 1
    if not end and len(data) > _LONGEST_LINE:
        end = len(data)
    return data[:end], data[end:]


def _decoded(data: bytes) -> tuple[str, list[str]]:
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
    if "\x1b" in text or "[0m" in text:
        text = _ANSI.sub("", text)
    lines = text.split("\n")
    if "\r" in text:
        # A progress bar writes its line again and again; what was written last stands.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    # After the end of the last line there is no other line.
    return text, lines[:-1] if lines[-1] == "" else lines
