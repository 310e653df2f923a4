"""A log as lines: read within a limit, without colours and prefixes, each with the rank or process that wrote it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import BinaryIO

from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine.standard_input import standard_input

_CHUNK = 1 << 20
_MAX_LINE = 1 << 14
# The limit for a stream that is not a file, and so may have no end.
MAX_STREAM = 512 << 20
_MAGIC = (b"\x7fELF", b"\x1f\x8b", b"PK\x03\x04", b"\x89PNG", b"\x80\x02")
# Control characters that no program writes into its log.
_NOT_TEXT = bytes({*range(8), *range(14, 27), *range(28, 32), 127})
# The escape character is often lost where a log was pasted, and its "[36m" stays.
_ANSI = re.compile(
    r"\x1b\[[0-9;?]{0,32}[ -/]{0,8}[@-~]|\x1b\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|\[\d{0,2}(?:;\d{1,3}){0,8}m"
)
_STAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
# glog's, as c10d writes it: [E1121 12:34:56.789012345 ProcessGroupNCCL.cpp:616]. It has no year.
_GLOG = re.compile(r"\[?[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)"

# The prefixes of torchrun, Ray, srun, containers and loggers; the groups name who wrote the line.
_PREFIX = re.compile(
    rf"""
      \[rank(?P<rank>\d{{1,9}})\]:[ ]?
    | \((?:[\w.:<>\- ]{{0,80}}\ )?pid=(?P<pid>\d{{1,12}})(?:,\ ip=(?P<ip>[^,)\s]{{1,80}}))?[^)\n]{{0,200}}\)[ ]?
    | \[[A-Za-z_-]{{1,40}}(?P<local>\d{{1,9}})(?:\|\d{{1,9}})?\]:[ ]?
    | [ ]{{0,4}}(?P<task>\d{{1,5}}):[ ]
      (?=\s{{0,20}}(?:Traceback|During|The\ above|File\ "|\S{{0,200}}(?:Error|Exception)\b|\[|\s))
    | \d{{4}}-\d\d-\d\dT[\d:.]{{1,30}}Z?[ ](?:stdout|stderr)[ ][FP][ ]
      # A logger's: time, name, level.
    | \d{{4}}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{{1,9}})?(?:Z|[+-]\d\d:?\d\d)?
      [ ]{{1,4}}[-|][ ]{{1,4}}[^\s|]{{1,80}}[ ]{{1,4}}[-|][ ]{{1,4}}{_LEVEL}[ ]{{1,8}}[-|][ ]?
    | {_LEVEL}[ ]{{1,4}}\d\d-\d\d[ ]\d\d:\d\d:\d\d[ ]\[[\w.]{{1,60}}:\d{{1,6}}\][ ]?
    | \d{{4}}-\d\d-\d\d[ T_]\d\d:\d\d:\d\d(?:[.,]\d{{1,9}})?(?:Z|[+-]\d\d:?\d\d)?[ ]?
      (?=\S{{0,200}}\s{{0,20}}(?:Traceback|File\ "|[\w.]{{0,200}}(?:Error|Exception)\b|\s|\[rank\d))
    | \d{{4}}/\d\d/\d\d[ ]\d\d:\d\d:\d\d[ ]
    | \[\d{{4}}-\d\d-\d\d[ T_]\d\d:\d\d:\d\d[^\]\s]{{0,20}}(?:[ ][^\]\s]{{1,20}})?\][ ]
      # A viewer's line number, a container's label.
    | \[\d{{1,9}}\][ ](?=\[rank\d)
    | [A-Za-z][\w.-]{{0,60}}-\d{{1,6}}[ ]{{1,20}}\|[ ]
    | (?:>[ ]?){{1,8}}
    """,
    re.VERBOSE,
)
# Where the next line begins in one that was joined of several.
_JOINT = re.compile(r"(?<=\S)[ ]{3,400}(?=\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)|(?<=[^\s>|])(?=\[rank\d{1,9}\]:)")


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its number, who wrote it ("" where nothing says), the text after its prefixes, the whole of it."""

    number: int
    source: str
    text: str
    raw: str


class LogInput:
    """One log; ``None`` is standard input. truncated: whether only its first MAX_STREAM bytes were read."""

    def __init__(self, path: pathlib.Path | None) -> None:
        self.path = path
        self.name = str(path) if path is not None else "standard input"
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
            yield _decode(whole)
        yield _decode(rest)
        if empty:
            raise UsageError(f"{self.name} is empty")

    def _read(self) -> Iterator[bytes]:
        read = 0
        try:
            with _open_log(self.path) as file:
                endless = not stat.S_ISREG(_mode(file))
                while data := file.read(_CHUNK):
                    yield data
                    read += len(data)
                    if endless and read >= MAX_STREAM:
                        self.truncated = True
                        return
        except OSError as error:
            raise UsageError(f"cannot read {self.name}: {error.strerror or error}") from None


def _mode(file: BinaryIO) -> int:
    try:
        return os.fstat(file.fileno()).st_mode
    except OSError:
        return stat.S_IFREG  # bytes in memory, which have an end


def _open_log(path: pathlib.Path | None) -> contextlib.AbstractContextManager[BinaryIO]:
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
    if not end and len(data) > _MAX_LINE:
        end = len(data)
    return data[:end], data[end:]


def _decode(data: bytes) -> tuple[str, list[str]]:
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
    if "\x1b" in text or "[0m" in text:
        text = _ANSI.sub("", text)
    lines = text.split("\n")
    if "\r" in text:
        # A progress bar writes its line again and again; what was written last stands.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    # After the end of the last line there is no other line.
    return text, lines[:-1] if lines[-1] == "" else lines


def lines_in(number: int, raw: str) -> Iterator[Line]:
    """The lines that were joined in one; mostly there is only one."""
    raw = raw[:_MAX_LINE]
    if "[rank" in raw or "   20" in raw:
        for piece in _JOINT.split(raw):
            yield parse_line(number, piece)
    else:
        yield parse_line(number, raw)


def parse_line(number: int, raw: str) -> Line:
    """A line without its prefixes, of which it can have several: a time, then Ray's, then torchrun's."""
    sources: list[str] = []
    position = 0
    raw = raw[:_MAX_LINE]
    while match := _PREFIX.match(raw, position):
        position = match.end()
        if source := _source_of(match):
            sources.append(source)
    # torchrun's rank is more precise than the processes around it.
    rank = next((source for source in reversed(sources) if source.startswith("rank")), "")
    return Line(number, rank or " ".join(dict.fromkeys(sources)), raw[position:], raw)


def _source_of(match: re.Match[str]) -> str:
    if match["rank"] is not None:
        return f"rank {int(match['rank'])}"
    if match["task"] is not None:
        return f"task {int(match['task'])}"
    if match["local"] is not None:
        return f"local rank {match['local']}"
    if match["pid"] is not None:
        return f"pid {match['pid']}" + (f" on {match['ip']}" if match["ip"] else "")
    return ""


def parse_time(raw: str) -> float | None:
    """Seconds of the first time stamp in the line, on an arbitrary but common scale; None without one."""
    if match := _STAMP.search(raw):
        return _seconds(*match.groups())
    if match := _GLOG.search(raw):
        return _seconds(str(datetime.now().year), *match.groups())
    return None


def _seconds(year: str, month: str, day: str, *clock: str | None) -> float | None:
    hour, minute, second, fraction = clock
    try:
        whole = datetime(int(year), int(month), int(day), int(hour or 0), int(minute or 0), int(second or 0))
        return whole.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except (ValueError, OverflowError, OSError):
        return None
