"""Turns the reports of all ranks into one verdict. These are pure functions over values; nothing here runs a case.

A missing record is never a pass. The first event is the cause, and outranks the events that follow from it. An error
like "connection closed by peer" is never the cause while another rank has a better error. A worker is not blamed for an
action of fsdp-doctor, such as ending the worker at a deadline.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fsdp_doctor.verdict.records import Failure, ProblemKind, RankReport, Stage

VerdictKind = Literal[
    "ok",
    "refused",
    "wrong",
    "race",
    "incomplete",
    "misplaced",
    "crash",
    "hang",
    "died",
    "oom",
    "poisoned",
    "leak",
    "order",
    "unsupported",
    "skipped",
    "lost",
]

MEANING: dict[VerdictKind, str] = {
    "ok": "every value is right on every rank, and training continues",
    "refused": "every rank raised an exception for a checkpoint that does not fit; the exact checkpoint is ok",
    "wrong": "a value, shape or form differs from the reference",
    "race": "a stream reads memory that another stream writes, and neither waits: the values depend on timing",
    "incomplete": "names are missing or superfluous, a rank got no data, or something was not loaded",
    "misplaced": "a tensor has another device or dtype than promised",
    "crash": "raised an exception",
    "hang": "did not end before the deadline; every rank's stack is in the report",
    "died": "a process ended in the middle: a signal or an exit",
    "oom": "ran out of device or host memory",
    "poisoned": "the method worked, but the next training step fails, or starts or ends with other weights",
    "leak": "memory was not given back, or grows with each call",
    "order": (
        "a hazard: two devices launch collectives in orders that block each other if each device runs one at a time"
    ),
    "unsupported": "the case cannot be built here; the reason says why",
    "skipped": "not run, because its scenario already failed before any method could run",
    "lost": "no result, because of an error in fsdp-doctor",
}

# The verdicts of cases that ran with the right result, and the verdicts of cases that did not run.
GOOD: frozenset[VerdictKind] = frozenset({"ok", "refused"})
NOT_RUN: frozenset[VerdictKind] = frozenset({"unsupported", "skipped"})

BAD_ON_EXACT = "bad on the exact checkpoint too"

# The stages in which the doctor's own code works, not the code under test.
OWN_STAGES: tuple[Stage, ...] = ("checkpoint", "reference", "fingerprint", "verify")
# The stages in which the method under test works.
_METHOD_STAGES = ("extract", "save", "load", "test")

PROBLEM_ORDER: tuple[ProblemKind, ...] = ("wrong", "race", "incomplete", "misplaced", "poisoned", "leak", "order")

_CASCADE = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|connection was closed"
    r"|connection refused|remote process exited|ncclRemoteError|pair closure|Read error \["
    r"|socket closed|No such file or directory.*shm|Watchdog caught collective",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(
    r"out of memory\. Tried to allocate|error: out of memory|OutOfMemoryError|can't allocate memory"
    r"|cannot allocate memory|std::bad_alloc|(?:CUDA|HIP|XPU|NPU|NCCL)\b.* out of memory",
    re.IGNORECASE,
)
_DEVICE_INDEX = re.compile(r"(\b(?:cuda|xpu|npu|hpu|emulated)):\d+|, index=\d+")
_DEVICE_MODULE = re.compile(r"torch/(cuda|xpu|accelerator)/")
_SECONDS = re.compile(r" for [\d.]+ s\b")
_IN_TORCH = re.compile(r"(^|/)torch/")
# Modules of Python in which a thread waits for another thread, a process or a file.
_WAITS_OF_PYTHON = re.compile(r"(^|/)(threading|queue|selectors|socket|subprocess|multiprocessing/\w+)\.py$")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line \d+ in (?P<function>\S+)')


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a case.

    ranks: the ranks that the reason is about.
    also: further problems, and consequences.
    """

    kind: VerdictKind
    reason: str = ""
    ranks: tuple[int, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def bad(self) -> bool:
        return self.kind not in GOOD | NOT_RUN


@dataclass(frozen=True, order=True)
class _Event:
    """Something that ended a rank's part in the case. Events sort with causes first, then by time and rank."""

    cascade: bool
    time: float
    rank: int
    kind: VerdictKind
    text: str


def classify(reports: Sequence[RankReport], world_size: int) -> Verdict:
    """Returns the verdict on one case from the reports of all ranks.

    A ``refused`` verdict must still go through :func:`judge_refusal`.
    """
    missing = sorted(set(range(world_size)) - {report.rank for report in reports})
    if missing:
        return Verdict(kind="lost", reason=f"no report came from {name_ranks(missing)}", ranks=tuple(missing))
    # The verdict is "refused" if all ranks refused a checkpoint and no rank found problems.
    records = [report.record for report in reports if report.record is not None and not _has_ended(report)]
    refusals = [record.refusal for record in records if record.done and record.refusal and not record.problems]
    if refusals and len(refusals) == len(reports):
        return Verdict(kind="refused", reason=refusals[0])
    events = sorted(
        (event for report in reports for event in _list_events(report)),
        key=lambda event: (event.cascade, event.time, event.rank),
    )
    hanging = [report for report in reports if report.stopped == "deadline"]
    if hanging and all(event.cascade for event in events):
        return _judge_hang(hanging, reports)
    if events:
        return _judge_events(events, reports)
    unfinished = [report.rank for report in reports if report.record is None or not report.record.done]
    if unfinished:
        reason = f"{name_ranks(unfinished)} did not finish, and reported no reason"
        return Verdict(kind="lost", reason=reason, ranks=tuple(unfinished))
    return _judge_records(reports)


def judge_refusal(refusal: Verdict, exact: Verdict, world_size: int) -> Verdict:
    """Returns the final verdict on a case that every rank refused.

    exact: the verdict on the same method with the exact checkpoint.

    If ``exact`` is good, the refusal stands. If the case with the exact checkpoint was lost or did not run, the verdict
    has the kind of ``exact``. Otherwise the exception was not a refusal, and the verdict is a crash.
    """
    if exact.kind in GOOD:
        return refusal
    also = f"{BAD_ON_EXACT}: {exact.kind}: {exact.reason}"
    kind = "crash" if exact.bad and exact.kind != "lost" else exact.kind
    return Verdict(kind=kind, reason=refusal.reason, ranks=tuple(range(world_size)), also=(also,))


def are_workers_whole(reports: Sequence[RankReport]) -> bool:
    """Returns whether the workers can run another case.

    They can if all ranks have ended the case in the same way, the process group works, and no worker must be retired.
    """
    records = [report.record for report in reports]
    if any(record is None or not record.done or not record.healthy or record.retire for record in records):
        return False
    if any(map(_has_ended, reports)):
        return False
    return len({record.failure is None for record in records if record is not None}) == 1


def has_died_before(reports: Sequence[RankReport]) -> bool:
    """Returns whether a worker had ended before the case began."""
    return any(report.exit and report.record is None for report in reports)


def fold(text: str) -> str:
    """Removes device indices from a text, because equal failures on different ranks differ only in them."""
    return _DEVICE_INDEX.sub(r"\1", text)


def strip_seconds(text: str) -> str:
    """Removes the seconds of a deadline from a text."""
    return _SECONDS.sub("", text)


def is_cascade(failure: Failure) -> bool:
    """Returns whether the exception only says that another process went away."""
    return _CASCADE.search(failure.message) is not None


def find_wait(stack: str) -> str:
    """Finds the function of torch.distributed, or the device, for which the rank waited; empty if it did not wait.

    stack: the output of faulthandler, whose current thread is the worker's main thread.
    """
    frames = _read_frames(stack)
    if frames and frames[0][1] == "synchronize" and _DEVICE_MODULE.search(frames[0][0]):
        return "synchronize, for the device"
    in_torch = itertools.takewhile(lambda frame: _IN_TORCH.search(frame[0]), frames)
    named = [function for file, function in in_torch if "torch/distributed/" in file and function != "wrapper"]
    return named[-1] if named else ""


def _read_frames(stack: str) -> list[tuple[str, str]]:
    """Returns (file, function) of each frame of the main thread, the innermost first."""
    current = stack.split("Current thread", 1)[-1].split("\nThread", 1)[0]
    return [(match["file"], match["function"]) for match in _FRAME.finditer(current)]


def _has_ended(report: RankReport) -> bool:
    """Returns whether the rank ended, or its supervisor ended it."""
    return bool(report.exit or report.garbled or report.stopped)


def _list_events(report: RankReport) -> list[_Event]:
    events = []
    record = report.record
    kind: VerdictKind
    if record is not None and record.failure is not None and not record.unsupported:
        failure = record.failure
        cascade = is_cascade(failure) or record.stage == "agree"
        kind = _choose_kind(failure, record.stage)
        before = "" if kind != "crash" or record.stage in _METHOD_STAGES else f"{record.stage}: "
        text = record.call_in_words + before + failure.summary
        events.append(_Event(cascade, failure.time, report.rank, kind, text))
    if report.exit:
        kind = "oom" if report.oom_killed else "died"
        killer = ": the kernel's out-of-memory killer was at work" if report.oom_killed else ""
        text = f"ended with {report.exit}{killer}"
        events.append(_Event(False, report.exit_time, report.rank, kind, text + _describe_stage(report)))
    if report.stopped == "memory":
        events.append(_Event(False, report.exit_time, report.rank, "oom", report.stopped_detail))
    if report.garbled:
        events.append(_Event(False, float("inf"), report.rank, "lost", f"wrote half a record: {report.garbled}"))
    return events


def _choose_kind(failure: Failure, stage: str) -> VerdictKind:
    if stage in OWN_STAGES:
        return "lost"
    if failure.type.endswith("MemoryError") or _OUT_OF_MEMORY.search(failure.message):
        return "oom"
    return "poisoned" if stage == "next step" else "crash"


def _judge_events(events: list[_Event], reports: Sequence[RankReport]) -> Verdict:
    """Returns the verdict on events that ended ranks. The first event is the cause; the others followed from it."""
    first = events[0]
    alike = [event for event in events if event.kind == first.kind and fold(event.text) == fold(first.text)]
    cause = min(alike, key=lambda event: event.rank)
    ranks = tuple(sorted({event.rank for event in alike}))
    where = "" if len(ranks) == len(reports) else f"{name_ranks(ranks)}: "
    problems = _list_problems(reports)
    if cause.kind == "poisoned" and problems and _rate_severity(problems[0].kind) < _rate_severity("poisoned"):
        # The extraction itself was already bad, so the failing training step is the lesser problem.
        return _judge_worst(problems, f"next training step: {where}{cause.text}")
    sentences = []
    for report in reports:
        if report.rank in ranks:
            continue
        event = next((event for event in events if event.rank == report.rank), None)
        if event is not None:
            sentences.append(f"rank {report.rank} then: {event.text}")
        elif report.stopped:
            sentences.append(f"rank {report.rank} {_describe_activity(report)}")
    sentences += [problem.sentence for problem in problems if problem.sentence]
    return Verdict(kind=cause.kind, reason=where + cause.text, ranks=ranks, also=tuple(sentences))


def _describe_activity(report: RankReport) -> str:
    """Describes the rank's activity when it was stopped."""
    if report.process_state:
        return report.process_state + _describe_stage(report)
    if waits := find_wait(report.stack):
        return f"waited in {waits}{_describe_stage(report)}"
    # An idle rank waits for a thread, a process or a file.
    frames = _read_frames(report.stack)
    is_idle = frames and _WAITS_OF_PYTHON.search(frames[0][0])
    return ("waited for no other rank" if is_idle else "was busy") + _describe_stage(report)


def _describe_stage(report: RankReport) -> str:
    if report.record is None:
        return " before the case began"
    stage = report.record.stage
    where = (report.record.call_in_words + ("" if stage in _METHOD_STAGES else stage)).removesuffix(": ")
    return f" ({where})" if where else ""


def _judge_hang(hanging: Sequence[RankReport], reports: Sequence[RankReport]) -> Verdict:
    """Returns the verdict on a hang.

    The verdict names the ranks that wait for no other rank; if there are none, the ranks still in the method; otherwise
    all ranks.
    """
    stages = {report.rank: report.record.stage if report.record else None for report in hanging}
    still_in = [r for r in hanging if r.process_state or stages[r.rank] != "agree"]
    busy = [r for r in still_in if r.process_state or not find_wait(r.stack)]
    activities = "; ".join(f"rank {report.rank} {_describe_activity(report)}" for report in hanging)
    return Verdict(
        kind="lost" if all(stage in OWN_STAGES for stage in stages.values()) else "hang",
        reason=f"{hanging[0].stopped_detail}: {activities}",
        ranks=tuple(report.rank for report in busy or still_in or hanging),
        also=tuple(problem.sentence for problem in _list_problems(reports)),
    )


@dataclass(frozen=True)
class _SharedProblem:
    kind: ProblemKind
    text: str
    ranks: tuple[int, ...]

    @property
    def sentence(self) -> str:
        return f"{self.kind}: {self.text}"


def _list_problems(reports: Sequence[RankReport]) -> list[_SharedProblem]:
    """Lists the problems, the worst kind first. Each problem is listed once, with all ranks that share it."""
    ranks_of: dict[tuple[ProblemKind, str], list[int]] = {}
    for report in reports:
        for problem in report.record.problems if report.record else ():
            ranks_of.setdefault((problem.kind, fold(problem.detail)), []).append(report.rank)
    problems = []
    for (kind, detail), ranks in ranks_of.items():
        where = "" if len(ranks) == len(reports) else f"{name_ranks(ranks)}: "
        problems.append(_SharedProblem(kind, where + detail, tuple(ranks)))
    return sorted(problems, key=lambda problem: _rate_severity(problem.kind))


def _judge_worst(problems: Sequence[_SharedProblem], *also: str) -> Verdict:
    worst, *others = problems
    sentences = (*(problem.sentence for problem in others), *also)
    return Verdict(kind=worst.kind, reason=worst.text, ranks=worst.ranks, also=sentences)


def _rate_severity(kind: ProblemKind) -> int:
    return PROBLEM_ORDER.index(kind)


def _judge_records(reports: Sequence[RankReport]) -> Verdict:
    reasons = {r.record.unsupported for r in reports if r.record and r.record.unsupported}
    problems = _list_problems(reports)
    if reasons and not problems:
        if not all(r.record and r.record.unsupported for r in reports):
            return Verdict(kind="lost", reason=f"the ranks disagree: some say {'; '.join(sorted(reasons))}")
        return Verdict(kind="unsupported", reason="; ".join(sorted(reasons)))
    return _judge_worst(problems) if problems else Verdict(kind="ok")


def name_ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(str(rank) for rank in ranks)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
