"""Which of the exceptions in a log is the cause, and which only followed from it."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_doctor import catalogue
from fsdp_doctor.catalogue import KnownFailure
from fsdp_doctor.explain.exceptions import Raised, Reader
from fsdp_doctor.explain.lines import chunks
from fsdp_doctor.explain.torchrun import FirstFailure, SummaryReader
from fsdp_doctor.verdict import fold

# What follows when another process has failed, by the name that it is told under.
_CONSEQUENCES: dict[str, re.Pattern[str]] = {
    "NCCL's watchdog ended a collective that another rank did not join": re.compile(
        r"Watchdog caught collective operation timeout|collective operation timeout|watchdog thread terminated"
    ),
    "the connection to a rank that had ended was closed": re.compile(
        r"connection (?:was )?closed|connection reset by|broken ?pipe|socket closed|pair closure|remote process exited"
        r"|ncclRemoteError|Read error \[|recvValue failed|failed to recv, got 0 bytes|Connection refused",
        re.IGNORECASE,
    ),
    "NCCL gave up its communicator": re.compile(r"NCCL communicator was aborted|ncclCommAbort"),
    "torchrun's summary": re.compile(r"ChildFailedError"),
    "ended from outside": re.compile(r"SignalException|got signal: (?:15|2)\b|SIGTERM|KeyboardInterrupt"),
    "Ray lost the process": re.compile(
        r"RayActorError|ActorDiedError|ActorUnavailableError|WorkerCrashedError|The actor (?:is dead|died)"
    ),
}
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_DISTINCT = 2_000
_SOURCES = 4_096


@dataclass
class Group:
    """Exceptions that say the same, on any rank: the first of them, and who raised it."""

    first: Raised
    entries: list[KnownFailure]
    consequence: str
    sources: set[str] = field(default_factory=set)
    count: int = 0

    def add(self, raised: Raised) -> None:
        self.count += 1
        if len(self.sources) < _SOURCES:
            self.sources.add(raised.source)
        other = raised
        if raised.file == self.first.file and raised.line < self.first.line:
            # Exceptions arrive here in the order in which their tracebacks end.
            self.first, other = raised, self.first
        if not self.first.frames and other.frames:
            self.first.frames = other.frames
            self.entries = catalogue.of_message(self.first.text, "\n".join(other.frames))


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a log says.

    cause: the exception that the others followed from; None where there is none in the log.
    entry: what the catalogue knows of it. also_possible: other entries with that message.
    near: where there is no entry, those whose messages share most words.
    consequences: exceptions that followed, by their name. unknown_before: one that came first and is not known, where
        a known one was taken for the cause. summary: what torchrun said.
    """

    cause: Group | None
    entry: KnownFailure | None = None
    also_possible: tuple[KnownFailure, ...] = ()
    near: tuple[KnownFailure, ...] = ()
    consequences: dict[str, int] = field(default_factory=dict)
    unknown_before: Raised | None = None
    summary: FirstFailure | None = None

    @property
    def only_consequences(self) -> bool:
        """Whether the log has nothing but what follows from a failure elsewhere."""
        return self.cause is not None and bool(self.cause.consequence)


def explain(files: Sequence[pathlib.Path | None]) -> Explanation:
    """Reads the files, ``None`` being stdin, each once. Raises UsageError for what is no text.

    Several files are the logs of several ranks: then time stamps, where all have them, say what came first.
    """
    groups: dict[str, Group] = {}
    summary: FirstFailure | None = None
    for path in files:
        reader, summaries = Reader(str(path) if path is not None else "stdin"), SummaryReader()
        for text, lines in chunks(path):
            _add(groups, reader.read(text, lines))
            summaries.read(text, lines)
        _add(groups, reader.end())
        summary = summary or summaries.found
    return _explanation(list(groups.values()), summary)


def _add(groups: dict[str, Group], found: Iterable[Raised]) -> None:
    for raised in found:
        key = _DIGITS.sub("#", fold(catalogue.one_line(raised.text)))
        if key not in groups:
            if len(groups) >= _DISTINCT:
                continue
            entries = catalogue.of_message(raised.text, "\n".join(raised.frames))
            groups[key] = Group(raised, entries, _consequence(raised))
        groups[key].add(raised)


def _consequence(raised: Raised) -> str:
    return next((name for name, pattern in _CONSEQUENCES.items() if pattern.search(raised.text)), "")


def _explanation(groups: list[Group], summary: FirstFailure | None) -> Explanation:
    ordered = sorted(groups, key=_order(groups))
    causes = [group for group in ordered if not group.consequence]
    named = [group for group in causes if summary is not None and summary.source in group.sources]
    known = [group for group in named or causes if group.entries] or [group for group in causes if group.entries]
    cause = next(iter(known or named or causes or [group for group in ordered if group.entries] or ordered), None)
    entries = cause.entries if cause is not None else []
    before = next(iter(causes), None)
    return Explanation(
        cause=cause,
        entry=entries[0] if entries else None,
        also_possible=tuple(entries[1:]),
        near=tuple(catalogue.nearest(cause.first.text)) if cause is not None and not entries else (),
        consequences=_counted(ordered, cause),
        unknown_before=before.first if before is not None and before is not cause and not before.entries else None,
        summary=summary,
    )


def _order(groups: list[Group]) -> Callable[[Group], tuple[float, int, int]]:
    """By time where all have one; else in the order of the log, which is that of arrival."""
    files = list(dict.fromkeys(group.first.file for group in groups))
    timed = all(group.first.time is not None for group in groups)

    def key(group: Group) -> tuple[float, int, int]:
        first = group.first
        return (first.time or 0.0) if timed else 0.0, files.index(first.file), first.line

    return key


def _counted(groups: list[Group], cause: Group | None) -> dict[str, int]:
    counts: dict[str, int] = {}
    for group in groups:
        if group.consequence and group is not cause:
            counts[group.consequence] = counts.get(group.consequence, 0) + group.count
    return counts
