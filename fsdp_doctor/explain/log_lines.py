"""One line of a log: without its prefixes, with the rank or process that wrote it; several that were joined, apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

_LONGEST_LINE = 1 << 14
_STAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
# glog's, as c10d writes it: [E1121 12:34:56.789012345 ProcessGroupNCCL.cpp:616]. It has no year.
_GLOG = re.compile(r"\[?[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)"

# What is written before a line by torchrun, Ray, srun, containers and loggers; the groups say who wrote it.
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


def lines_in(number: int, raw: str) -> Iterator[Line]:
    """The lines that were joined in one, mostly one alone."""
    raw = raw[:_LONGEST_LINE]
    if "[rank" in raw or "   20" in raw:
        for piece in _JOINT.split(raw):
            yield parsed(number, piece)
    else:
        yield parsed(number, raw)


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
