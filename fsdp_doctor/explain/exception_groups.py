"""The exceptions of all ranks, equal ones together, and which of them only follow from a failure elsewhere."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fsdp_doctor.explain.exceptions import Raised
from fsdp_doctor.known import signatures
from fsdp_doctor.known.catalogue import has_signature
from fsdp_doctor.known.grading import Match
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
    "torchrun's summary": re.compile(r"^ChildFailedError|failed \(exitcode: -?\d"),
    "a distributed checkpoint failed on a rank": re.compile(r"^CheckpointException: CheckpointException ranks:"),
    "the process was ended from outside": re.compile(r"^(?:SignalException|KeyboardInterrupt)|got signal: (?:15|2)\b"),
    "Ray lost the process": re.compile(
        r"RayActorError|ActorDiedError|ActorUnavailableError|WorkerCrashedError|The actor (?:is dead|died)"
        r"|A worker died or was killed"
    ),
}
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_MOST_GROUPS = 2_000
_MOST_SOURCES = 4_096


@dataclass
class Group:
    """Exceptions with the same message, of any rank.

    signed: whether an entry of the catalogue has its message. matches: the entries that it may be, once the whole log
    is read. consequence: one of the names above, or empty where it does not follow from a failure elsewhere. sources:
    the ranks or processes that raised it.
    """

    first: Raised
    signed: bool
    consequence: str
    matches: tuple[Match, ...] = ()
    sources: set[str] = field(default_factory=set)
    count: int = 0

    def add(self, raised: Raised) -> None:
        self.count += 1
        if len(self.sources) < _MOST_SOURCES:
            self.sources.add(raised.source)
        if raised is self.first:
            return
        other = raised
        if _earlier(raised, self.first) or (self.first.quoted and not raised.quoted):
            self.first, other = raised, self.first
        # What one traceback shows to be raised elsewhere, a script only raised again.
        if other.frames and not other.script:
            self.first.script = ""
        # Of the same failure, the longest traceback says most.
        if len(other.frames) > len(self.first.frames):
            self.first.frames = other.frames

    @property
    def doubt(self) -> tuple[bool, ...]:
        """Why another one may rather be the cause: programs log what they handle, and handle what they raise."""
        first = self.first
        bare = not first.frames
        unknown = not any(match.grade != "possible" for match in self.matches)
        return first.cut, first.quoted, first.logged and bare, first.follows, unknown, first.swallowed, bare


class Groups:
    """There is a limit to those that have no entry and no traceback."""

    def __init__(self) -> None:
        self._by_text: dict[str, Group] = {}
        self.dropped = 0

    def add(self, found: Iterable[Raised]) -> None:
        for raised in found:
            key = _key(raised.text)
            if key not in self._by_text and not self._admit(key, raised):
                self.dropped += 1
            else:
                self._by_text[key].add(raised)

    def ordered(self) -> list[Group]:
        groups = list(self._by_text.values())
        return sorted(groups, key=_order(groups))

    def _admit(self, key: str, raised: Raised) -> bool:
        signed = has_signature(raised.text)
        full = len(self._by_text) >= _MOST_GROUPS
        if full and not ((signed or raised.frames) and len(self._by_text) < 2 * _MOST_GROUPS):
            return False
        consequence = next((name for name, pattern in _CONSEQUENCES.items() if pattern.search(raised.text)), "")
        self._by_text[key] = Group(raised, signed, consequence)
        return True


@functools.lru_cache(maxsize=4096)
def _key(text: str) -> str:
    """The first line, without what differs between ranks and attempts."""
    return _DIGITS.sub("#", fold(signatures.one_line(text.split("\n", 1)[0])))


def _earlier(one: Raised, other: Raised) -> bool:
    """Exceptions arrive in the order in which their tracebacks end; and files in that of the command."""
    if one.file == other.file:
        return one.line < other.line
    return one.time is not None and other.time is not None and one.time < other.time


def _order(groups: list[Group]) -> Callable[[Group], tuple[float, int, int]]:
    """By time where all have one; else in the order of the log, which is that of arrival."""
    files = {name: index for index, name in enumerate(dict.fromkeys(group.first.file for group in groups))}
    timed = all(group.first.time is not None for group in groups)

    def key(group: Group) -> tuple[float, int, int]:
        first = group.first
        return (first.time or 0.0) if timed else 0.0, files[first.file], first.line

    return key
