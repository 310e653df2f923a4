"""Which of the exceptions in a log is the cause, which only followed from it, and how sure the catalogue is of it."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from fsdp_doctor.explain import foreign
from fsdp_doctor.explain.collectives import Hang, hang_of
from fsdp_doctor.explain.exception_groups import Group, Groups
from fsdp_doctor.explain.exceptions import Raised, Reader
from fsdp_doctor.explain.flight_recorder import Dump, dump_in, parting
from fsdp_doctor.explain.log_input import LogInput
from fsdp_doctor.explain.torchrun_summary import FirstFailure, SummaryReader
from fsdp_doctor.explain.watchdog import CollectiveReader
from fsdp_doctor.known import catalogue
from fsdp_doctor.known.catalogue import KnownFailure
from fsdp_doctor.known.clues import LogClues
from fsdp_doctor.known.grading import Evidence, Grade, Match, match_evidence

Showing: TypeAlias = Literal["failure", "hang", "consequences", "cut", "nothing"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a log says.

    showing: what there is in it: a failure; a hang; only consequences of a failure elsewhere; only tracebacks that were
    cut off; or none of these.
    cause: the exception that the others followed from; None where there is none in the log.
    matches: the entries of the catalogue that it may be, the surest first.
    ours: whether the failure names FSDP, a DTensor or a sharded checkpoint. foreign: where it does not, what failed,
    as a noun; empty where its message does not say. near: where it does and nothing matches, the entries most like it.
    hang: where the ranks stood, if collectives did not end.
    consequences: how many exceptions followed from the cause, by the name of the consequence.
    others: the exceptions that are neither the cause nor a consequence, in order.
    summary: what torchrun said. dropped: the number of exceptions that were too many to keep. truncated: files that
    were not read to their end. dumps: how many of the files were a flight recorder's.
    killed_for_memory: where the log says that a process was killed for want of host memory; empty where it does not.
    """

    showing: Showing
    cause: Group | None = None
    matches: tuple[Match, ...] = ()
    ours: bool = False
    foreign: str = ""
    near: tuple[KnownFailure, ...] = ()
    hang: Hang | None = None
    consequences: dict[str, int] = field(default_factory=dict)
    others: tuple[Raised, ...] = ()
    summary: FirstFailure | None = None
    dropped: int = 0
    truncated: tuple[str, ...] = ()
    dumps: int = 0
    killed_for_memory: str = ""

    @property
    def grade(self) -> Grade | None:
        """Of the surest match; None where nothing matches."""
        return self.matches[0].grade if self.matches else None

    @property
    def entry(self) -> KnownFailure | None:
        """The entry that it is for certain."""
        return self.matches[0].entry if self.grade == "known" else None


# What the kernel, Slurm and Ray say of a process that they killed for want of host memory.
_KILLED_FOR_MEMORY = re.compile(
    r"invoked oom-killer|\boom-kill:constraint|\boom_kill events?\b|[Oo]ut of memory: Killed process \d"
    r"|\bOOM[ -]?Killed|node running low on memory"
)
_HINTS_OF_KILLERS = ("oom-kill", "oom_kill", "OOM", "Killed process", "running low on memory")


class _Logs:
    """What has been read of all files."""

    def __init__(self) -> None:
        self.groups = Groups()
        self.clues = LogClues()
        self.collectives = CollectiveReader()
        self.summary: FirstFailure | None = None
        self.dumps: list[Dump] = []
        self.truncated: list[str] = []
        self.killed_for_memory = ""

    def read(self, path: pathlib.Path | None) -> None:
        if path is not None and (dump := dump_in(path, len(self.dumps))) is not None:
            self.dumps.append(dump)
            return
        log = LogInput(path)
        reader, summaries, number = Reader(log.name), SummaryReader(), 0
        for text, lines in log.chunks():
            if not self.killed_for_memory and any(hint in text for hint in _HINTS_OF_KILLERS):
                told = (at for at, line in enumerate(lines, number + 1) if _KILLED_FOR_MEMORY.search(line))
                self.killed_for_memory = next((f"{log.name}, line {at}" for at in told), "")
            number += len(lines)
            self.groups.add(reader.read(text, lines))
            summaries.read(text, lines)
            self.collectives.read(text, lines)
            self.clues.read(text)
        self.groups.add(reader.end())
        self.summary = self.summary or summaries.found
        if log.truncated:
            self.truncated.append(log.name)

    def evidence(self, group: Group) -> Evidence:
        first = group.first
        return Evidence(
            message=first.text,
            traceback="\n".join(first.frames),
            script=first.script,
            indirect=first.quoted,
            log=self.clues.shown,
            torch=self.clues.torch,
        )

    @property
    def hang(self) -> Hang | None:
        """Of the dumps, where there are any: they say more than the watchdog."""
        return hang_of(parting(self.dumps)) or self.collectives.hang() if self.dumps else self.collectives.hang()


def explain(files: Sequence[pathlib.Path | None]) -> Explanation:
    """Reads the files, ``None`` being standard input, each once: logs, or dumps of torch's flight recorder.

    Raises UsageError for one that is neither. Several files are those of several ranks: then time stamps, where all
    have them, say what came first.
    """
    logs = _Logs()
    for path in files:
        logs.read(path)
    return _explanation(logs)


def _explanation(logs: _Logs) -> Explanation:
    ordered = logs.groups.ordered()
    summary, hang = logs.summary, logs.hang
    causes = [group for group in ordered if not group.consequence]
    for group in causes:
        group.matches = tuple(match_evidence(logs.evidence(group))) if group.signed else ()
    named = [group for group in causes if summary is not None and summary.is_one_of(group.sources)]
    # sorted() keeps the order of what is equally likely.
    likeliest = sorted(named or causes, key=lambda group: group.doubt)
    # A traceback that was cut off says less than what followed from it.
    whole = [group for group in likeliest if not group.first.cut]
    cause = next(iter([*whole, *(group for group in ordered if group.consequence), *likeliest]), None)
    showing = _showing(cause, hang)
    found = cause.matches if cause is not None and showing == "failure" else ()
    if showing == "hang" and hang is not None:
        found = tuple(_of_hang(logs, hang))
    ours = cause is not None and _is_ours(logs, cause)
    unknown = cause is not None and showing == "failure" and not found
    return Explanation(
        showing=showing,
        cause=cause,
        matches=found,
        ours=ours,
        foreign=foreign.kind_of(cause.first.text) if cause is not None and showing == "failure" and not ours else "",
        near=tuple(catalogue.nearest(cause.first.text)) if cause is not None and unknown and ours else (),
        hang=hang,
        consequences=_counted(ordered, cause),
        others=tuple(group.first for group in causes if group is not cause and not (whole and group.first.cut)),
        summary=summary,
        dropped=logs.groups.dropped,
        truncated=tuple(logs.truncated),
        dumps=len(logs.dumps),
        killed_for_memory=logs.killed_for_memory,
    )


def _showing(cause: Group | None, hang: Hang | None) -> Showing:
    if cause is not None and not cause.consequence and not cause.first.cut:
        return "failure"
    if hang is not None:
        return "hang"
    if cause is None:
        return "nothing"
    return "consequences" if cause.consequence else "cut"


def _is_ours(logs: _Logs, cause: Group) -> bool:
    under_fsdp = logs.evidence(cause).shows("fsdp")
    if any(match.grade != "possible" or under_fsdp for match in cause.matches):
        return True
    return foreign.names_our_field(cause.first.text, cause.first.frames, under_fsdp=under_fsdp)


def _of_hang(logs: _Logs, hang: Hang) -> list[Match]:
    """The entries that it may be; known only where some ranks gather a model while others are elsewhere."""
    stacks = ["\n".join(one.frames) for one in hang.waiting]
    apart = hang.differs and len(set(map(foreign.gathers, stacks))) > 1
    for operation in sorted({one.op for one in hang.waiting}):
        evidence = Evidence(
            message=f"Watchdog caught collective operation timeout: WorkNCCL(OpType={operation})",
            traceback="\n".join(stacks),
            indirect=not apart,
            log=logs.clues.shown,
            torch=logs.clues.torch,
        )
        if found := match_evidence(evidence):
            return found
    return []


def _counted(groups: list[Group], cause: Group | None) -> dict[str, int]:
    counts: dict[str, int] = {}
    for group in groups:
        if group.consequence and group is not cause:
            counts[group.consequence] = counts.get(group.consequence, 0) + group.count
    return counts
