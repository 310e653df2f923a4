"""Which of the exceptions in a log is the cause, and which only followed from it."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_doctor.explain.exceptions import Raised, Reader
from fsdp_doctor.explain.log_lines import chunks, name_of
from fsdp_doctor.explain.torchrun_summary import FirstFailure, SummaryReader
from fsdp_doctor.known import catalogue, signatures
from fsdp_doctor.known.catalogue import KnownFailure
from fsdp_doctor.verdict.classification import fold

# What follows when another process has failed, by the words that the user reads.
_CONSEQUENCES: dict[str, re.Pattern[str]] = {
    "NCCL's watchdog ended a collective that another rank did not join": re.compile(
        r"collective operation timeout|watchdog thread terminated|Some NCCL operations have failed"
    ),
    "the connection to a rank that had ended was closed": re.compile(
        r"connection (?:was )?closed by|connection reset by peer|broken ?pipe|socket closed|pair closure"
        r"|remote process exited|ncclRemoteError|Read error \[|recvValue failed|failed to recv, got 0 bytes"
        r"|\[c10d\].*refused",
        re.IGNORECASE,
    ),
    "a rank timed out while it waited for another": re.compile(
        r"Timed out waiting \d+ ?ms|wait timeout after \d+ ?ms|DistStoreError"
    ),
    "NCCL aborted its communicator": re.compile(r"NCCL communicator was aborted|ncclCommAbort"),
    "torchrun's summary": re.compile(r"^ChildFailedError"),
    "the process was ended from outside": re.compile(r"^(?:SignalException|KeyboardInterrupt)|got signal: (?:15|2)\b"),
    "Ray lost the process": re.compile(
        r"RayActorError|ActorDiedError|ActorUnavailableError|WorkerCrashedError|The actor (?:is dead|died)"
    ),
}
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_MOST_GROUPS = 2_000
_MOST_SOURCES = 4_096


@dataclass
class Group:
    """Exceptions with the same message, of any rank.

    entries: of the catalogue, that match for certain; possible: that may. consequence: one of the names above, or
    empty where it does not follow from a failure elsewhere. sources: the ranks or processes that raised it.
    """

    first: Raised
    entries: list[KnownFailure]
    possible: list[KnownFailure]
    consequence: str
    sources: set[str] = field(default_factory=set)
    count: int = 0

    def add(self, raised: Raised) -> None:
        self.count += 1
        if len(self.sources) < _MOST_SOURCES:
            self.sources.add(raised.source)
        if raised is self.first:
            return
        other = raised
        if _earlier(raised, self.first):
            self.first, other = raised, self.first
        if not self.first.frames and other.frames:
            self.first.frames = other.frames
            self.entries, self.possible = catalogue.of_message(self.first.text, "\n".join(other.frames))


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a log says.

    cause: the exception that the others followed from; None where there is none in the log.
    entry: what the catalogue has on it. possible: entries with the same message, which nothing in the log tells apart.
    near: where there is neither, the entries whose messages share most words with it.
    consequences: how many exceptions followed from the cause, by the name of the consequence.
    others: the exceptions that are neither the cause nor a consequence, in order.
    summary: what torchrun said. dropped: the number of exceptions that were too many to keep.
    """

    cause: Group | None
    entry: KnownFailure | None = None
    possible: tuple[KnownFailure, ...] = ()
    near: tuple[KnownFailure, ...] = ()
    consequences: dict[str, int] = field(default_factory=dict)
    others: tuple[Raised, ...] = ()
    summary: FirstFailure | None = None
    dropped: int = 0

    @property
    def only_consequences(self) -> bool:
        """Whether every exception in the log follows from a failure elsewhere."""
        return self.cause is not None and bool(self.cause.consequence)


def explain(files: Sequence[pathlib.Path | None]) -> Explanation:
    """Reads the files, ``None`` being standard input, each once. Raises UsageError for one that is not text.

    Several files are the logs of several ranks: then time stamps, where all have them, say what came first.
    """
    groups = _Groups()
    summary: FirstFailure | None = None
    for path in files:
        reader, summaries = Reader(name_of(path)), SummaryReader()
        for text, lines in chunks(path):
            groups.add(reader.read(text, lines))
            summaries.read(text, lines)
        groups.add(reader.end())
        summary = summary or summaries.found
    return _explanation(list(groups.by_text.values()), summary, groups.dropped)


class _Groups:
    """All exceptions, equal ones together; there is a limit to those that have no entry and no traceback."""

    def __init__(self) -> None:
        self.by_text: dict[str, Group] = {}
        self.dropped = 0

    def add(self, found: Iterable[Raised]) -> None:
        for raised in found:
            key = _key(raised.text)
            if key not in self.by_text and not self._admit(key, raised):
                self.dropped += 1
            else:
                self.by_text[key].add(raised)

    def _admit(self, key: str, raised: Raised) -> bool:
        entries, possible = catalogue.of_message(raised.text, "\n".join(raised.frames))
        full = len(self.by_text) >= _MOST_GROUPS
        if full and not ((entries or raised.frames) and len(self.by_text) < 2 * _MOST_GROUPS):
            return False
        self.by_text[key] = Group(raised, entries, possible, _consequence(raised))
        return True


@functools.lru_cache(maxsize=4096)
def _key(text: str) -> str:
    """The first line, without what differs between ranks and attempts."""
    return _DIGITS.sub("#", fold(signatures.one_line(text.split("\n", 1)[0])))


def _consequence(raised: Raised) -> str:
    return next((name for name, pattern in _CONSEQUENCES.items() if pattern.search(raised.text)), "")


def _explanation(groups: list[Group], summary: FirstFailure | None, dropped: int) -> Explanation:
    ordered = sorted(groups, key=_order(groups))
    causes = [group for group in ordered if not group.consequence]
    named = [group for group in causes if summary is not None and summary.is_one_of(group.sources)]
    # sorted() keeps the order of what is equally likely.
    cause = next(iter(sorted(named or causes, key=_doubt)), None) or next(iter(ordered), None)
    known = cause.entries if cause is not None and not cause.consequence else []
    possible = [*(cause.entries if not known else known[1:]), *cause.possible] if cause is not None else []
    return Explanation(
        cause=cause,
        entry=known[0] if known else None,
        possible=tuple(possible),
        near=tuple(catalogue.nearest(cause.first.text)) if cause is not None and not known and not possible else (),
        consequences=_counted(ordered, cause),
        others=tuple(group.first for group in causes if group is not cause),
        summary=summary,
        dropped=dropped,
    )


def _doubt(group: Group) -> tuple[bool, bool, bool, bool]:
    """Why another one may rather be the cause: programs log what they handle, and handle what they raise."""
    first = group.first
    return first.logged and not first.frames, not group.entries, first.swallowed, not first.frames


def _earlier(one: Raised, other: Raised) -> bool:
    """Exceptions arrive in the order in which their tracebacks end; and files in that of the command."""
    if one.file == other.file:
        return one.line < other.line
    return one.time is not None and other.time is not None and one.time < other.time


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
