"""A log as lines: decoded, without colours, each with the rank or process that wrote it."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import BinaryIO

from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine.standard_input import standard_input

_CHUNK = 1 << 20
_LONGEST_LINE = 1 << 14
_MAGIC = (b"\x7fELF", b"\x1f\x8b", b"PK\x03\x04", b"\x89PNG", b"\x80\x02")
# The escape character is often lost where a log was pasted, and its "[36m" stays.
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\[\d{0,2}(?:;\d{1,3})*m")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T_](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
# glog's, as c10d writes it: [E1121 12:34:56.789012345 ProcessGroupNCCL.cpp:616]. It has no year.
_GLOG = re.compile(r"\[?[IWEF](\d\d)(\d\d) (\d\d:\d\d:\d\d)(?:\.(\d{1,6}))?")

# What is written before a line by torchrun, Ray, srun and containers; the groups say who wrote it.
_PREFIX = re.compile(
    r"""
      \[rank(?P<rank>\d+)\]:[ ]?
    | \((?:[\w.:<>\- ]*\ )?pid=(?P<pid>\d+)(?:,\ ip=(?P<ip>[^,)\s]+))?[^)\n]{0,200}\)[ ]?
    | \[[A-Za-z_-]+(?P<local>\d+)(?:\|\d+)?\]:[ ]?
    | [ ]{0,4}(?P<task>\d{1,5}):[ ](?=\s*(?:Traceback|During|The\ above|File\ "|\S{0,200}(?:Error|Exception)\b|\[|\s))
    | \d{4}-\d\d-\d\dT[\d:.]+Z?[ ](?:stdout|stderr)[ ][FP][ ]
    | \d{4}-\d\d-\d\d[ T_]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?[ ]?
      (?=\S{0,200}\s{0,20}(?:Traceback|File\ "|[\w.]{0,200}(?:Error|Exception)\b|\s))
    | (?:>[ ]?)+
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its number, who wrote it ("" where nothing says), the text after its prefixes, the whole of it."""

    number: int
    source: str
    text: str
    raw: str


def chunks(path: pathlib.Path | None) -> Iterator[tuple[str, list[str]]]:
    """(text, its lines) piece by piece, about a mebibyte each; ``None`` is standard input.

    Raises UsageError for a file that cannot be read, is empty, or is not text.
    """
    name = name_of(path)
    empty = True
    try:
        with _opened(path) as file:
            rest = b""
            while data := file.read(_CHUNK):
                if empty and _is_binary(data):
                    raise UsageError(f"{name} is not a text file")
                # A log that was truncated while it was written to has holes of them.
                data = data.replace(b"\0", b"")
                empty = empty and not data.strip()
                whole, rest = _split(rest + data)
                yield _decoded(whole)
            yield _decoded(rest)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from None
    if empty:
        raise UsageError(f"{name} is empty")


def name_of(path: pathlib.Path | None) -> str:
    return str(path) if path is not None else "standard input"


def _opened(path: pathlib.Path | None) -> contextlib.AbstractContextManager[BinaryIO]:
    return open(path, "rb") if path is not None else contextlib.nullcontext(standard_input())


def _is_binary(data: bytes) -> bool:
    return data.startswith(_MAGIC) or data[:4096].count(0) * 10 > len(data[:4096])


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


def parsed(number: int, raw: str) -> Line:
    """Takes the prefixes off. A line can have several: a time, then Ray's, then torchrun's."""
    sources: list[str] = []
    position = 0
    raw = raw[:_LONGEST_LINE]
    while match := _PREFIX.match(raw, position):
        position = match.end()
        if named := _named(match):
            sources.append(named)
    # torchrun's own word for the rank says more than the processes around it.
    rank = next((source for source in reversed(sources) if source.startswith("rank")), "")
    return Line(number, rank or " ".join(dict.fromkeys(sources)), raw[position:], raw)


def _named(match: re.Match[str]) -> str:
    if match["rank"] is not None:
        return f"rank {int(match['rank'])}"
    if match["task"] is not None:
        return f"task {int(match['task'])}"
    if match["local"] is not None:
        return f"local rank {match['local']}"
    if match["pid"] is not None:
        return f"pid {match['pid']}" + (f" on {match['ip']}" if match["ip"] else "")
    return ""


def time_of(raw: str) -> float | None:
    """Seconds of the first time stamp in the line, on an arbitrary but common scale; None without one."""
    if match := _STAMP.search(raw):
        return _seconds(f"{match[1]} {match[2]}", match[3])
    if match := _GLOG.search(raw):
        return _seconds(f"{datetime.now().year}-{match[1]}-{match[2]} {match[3]}", match[4])
    return None


def _seconds(stamp: str, fraction: str | None) -> float | None:
    try:
        whole = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
    return whole.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
