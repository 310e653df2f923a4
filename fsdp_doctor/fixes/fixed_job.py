"""Runs a user's job with fixes for its framework: finds the functions to replace, and reads the processes' reports."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.fixes import entry, job_hook
from fsdp_doctor.fixes.entry import FrameworkFix
from fsdp_doctor.fixes.sources import FixedFunction, choose_fixes, find_function, is_for
from fsdp_doctor.machine.injection import INJECTED, make_variables
from fsdp_doctor.machine.versions import read_installed_versions
from fsdp_doctor.text import format_count, join_some

_HOOK = pathlib.Path(job_hook.__file__)
# Options of Python with which it ignores PYTHONPATH, or imports no sitecustomize, alone or among others.
_ISOLATING = re.compile(r"-[a-zA-Z]*[IES]")
_WITH_VALUE = ("-m", "-c", "-W", "-X")


@dataclass(frozen=True, kw_only=True)
class FixReport:
    """The reports of a job's processes about one fix.

    called: the number of calls of the replacement.
    left: the number of calls of the replacement that it passed to the original.
    callers: the ranks that called the replacement.
    world: the number of ranks, as the callers reported it; the largest of several numbers.
    missing: the ranks that never called the replacement, although a rank of the same node did; empty for a function
        that only some ranks call.
    unheard: the other ranks that never called the replacement, which may be on another node; empty for a function
        that only some ranks call.
    processes: the number of processes in which the function was replaced.
    overridden: the classes that define the function themselves.
    verified: for each rank that compared a sync, the number of tensors that it sent, and the differences.
    """

    id: str
    called: int
    left: int
    callers: tuple[int, ...]
    world: int
    missing: tuple[int, ...]
    unheard: tuple[int, ...]
    processes: int
    overridden: tuple[str, ...]
    verified: Mapping[int, tuple[int, tuple[str, ...]]]

    @property
    def sentences(self) -> Iterator[str]:
        """Sentences for the user about this fix."""
        if not self.processes:
            yield (
                f"fix {self.id} reached no process of the job: no process imported the fixed module, or "
                "PYTHONPATH does not reach the ranks (python -I, srun --export=NONE, containers, a Ray "
                "cluster that was started before)"
            )
            return
        if not self.called:
            by = f": {join_some(self.overridden)} overrides the function" if self.overridden else ""
            yield f"fix {self.id}: replaced in {self.processes} of the job's processes, but never called{by}"
            return
        left = f", {self.left} of them left to the original" if self.left else ""
        ranks, times = format_count(self.world, "rank"), format_count(self.called, "time")
        yield f"fix {self.id}: replaced on {len(self.callers)} of {ranks}, called {times}{left}"
        if self.missing:
            ranks = join_some([str(rank) for rank in self.missing])
            yield f"fix {self.id} did not reach rank {ranks}: PYTHONPATH must reach every rank"
        if self.unheard:
            ranks = join_some([str(rank) for rank in self.unheard])
            yield (
                f"fix {self.id}: rank {ranks} reported nothing, and may be on another node: see the output of this rank"
            )
        for rank, (num_tensors, differences) in sorted(self.verified.items()):
            equal = "the tensors of the first sync equal the model's" if not differences else "; ".join(differences)
            yield f"fix {self.id}: rank {rank}, {format_count(num_tensors, 'tensor')}: {equal}"


@dataclass(frozen=True, kw_only=True)
class FixedJobRun:
    """The end of a job that ran with fixes.

    job_code: the exit code of the job.
    reports: the report of each fix.
    refusals: the reasons for which processes refused a fix.
    """

    job_code: int
    reports: tuple[FixReport, ...]
    refusals: tuple[str, ...]

    @property
    def sentences(self) -> Iterator[str]:
        """Sentences for the user; if a fix was refused, only the reasons."""
        yield from self.refusals
        for report in self.reports if not self.refusals else ():
            yield from report.sentences

    @property
    def exit_code(self) -> int:
        """The exit code of ``fsdp-doctor fix``: 3 if a fix was refused, otherwise the job's exit code if it is not 0.

        After a job that ended with 0: 3 if no fix was called; 1 if a rank never called a fix or sent tensors that
        differ from the model; otherwise 0.
        """
        if self.refusals:
            return CannotRun.exit_code
        if self.job_code:
            return self.job_code
        if not any(report.called for report in self.reports):
            return CannotRun.exit_code
        return int(any(report.missing or any(d for _, d in report.verified.values()) for report in self.reports))


def find_fixed_functions(frameworks: Sequence[str], ids: Sequence[str]) -> list[FixedFunction]:
    """Finds the functions to replace.

    These are the functions with the given ids, or all functions of the given frameworks. Without ids and frameworks,
    the installed framework that trains is chosen, or else the installed libraries (``entry.LIBRARIES``) that have
    fixes.

    Raises UsageError for an unknown framework or id, or if several frameworks that train are installed and none is
    named. Raises CannotRun if no framework is installed, or if a function is refused (:func:`find_function`).
    """
    known = {fix.id: fix.framework for fix in entry.FIXES if not frameworks or fix.framework in frameworks}
    for name in frameworks:
        entry.list_fixes(name)
    for id in ids:
        if id not in known:
            whose = " and ".join(frameworks) or "the table of fixes"
            raise UsageError(f"--only {id}: there is no such fix; {whose} has {', '.join(known)}")
    chosen = frameworks or [known[id] for id in ids]
    of_chosen = [fix for name in dict.fromkeys(chosen) for fix in choose_fixes(name)]
    fixes = of_chosen if chosen else _choose_installed()
    functions = [find_function(fix) for fix in fixes if not ids or fix.id in ids]
    if missing := [id for id in ids if id not in {function.fix.id for function in functions}]:
        raise CannotRun(f"--only {missing[0]}: this fix is not for the installed release")
    return functions


def _choose_installed() -> list[FrameworkFix]:
    """Chooses the fixes for the installed framework that trains or, without such a framework, for installed libraries.

    Raises UsageError if several frameworks that train are installed, and CannotRun if no installed release has a fix.
    """
    distributions = {fix.framework: fix.distribution for fix in entry.FIXES}
    installed = read_installed_versions(distributions.values())
    present = [framework for framework, distribution in distributions.items() if distribution in installed]
    training = [framework for framework in present if framework not in entry.LIBRARIES]
    if not present:
        raise CannotRun(
            f"none of the frameworks that have fixes is installed here ({', '.join(distributions)}): run this with "
            "the Python of the job"
        )
    if len(training) > 1:
        raise UsageError(
            f"several installed frameworks have fixes ({', '.join(training)}): name the job's with --framework"
        )
    if training or len(present) == 1:
        return choose_fixes((training or present)[0])
    fixes = [fix for fix in entry.FIXES if fix.framework in present and is_for(fix, installed[fix.distribution])]
    if not fixes:
        raise CannotRun(f"no fix is for the installed releases of {' and '.join(present)}")
    return fixes


def run_with_fixes(command: Sequence[str], functions: Sequence[FixedFunction], *, verify: bool) -> FixedJobRun:
    """Runs a job with fixes on this process's input and output, and passes signals to it.

    Returns the job's exit code, and the reports and refusals of the job's processes. Raises UsageError for a command
    that cannot be started, or whose Python would not execute the fixes.

    verify: whether to compare the first sync of each process with the model.
    """
    _refuse_isolated(command)
    fixes = [function.fix for function in functions]
    ids = [fix.id for fix in fixes]
    modules = {function.fix.module: _HOOK for function in functions}
    with tempfile.TemporaryDirectory(prefix="fsdp-doctor-fix-") as directory:
        options = {"events": directory, "ids": ids, "verify": verify, "injected": str(INJECTED)}
        variables = {**make_variables({**modules, "ray": _HOOK}), "FSDP_DOCTOR_FIX": json.dumps(options)}
        code = _run(command, os.environ | variables)
        files = sorted(pathlib.Path(directory).iterdir())
        # A process that was killed may have left part of a line at the end.
        events = [json.loads(line) for file in files for line in file.read_text().split("\n")[:-1]]
    refusals = dict.fromkeys(event["reason"] for event in events if event["kind"] == "refused")
    return FixedJobRun(
        # As a shell has it.
        job_code=128 - code if code < 0 else code,
        reports=tuple(_summarize(fix, [event for event in events if event.get("fix") == fix.id]) for fix in fixes),
        refusals=tuple(refusals),
    )


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a command, passes signals to it, and returns its exit code, negative for a signal.

    Raises UsageError if the command cannot be started.
    """
    jobs: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        # A terminal sends SIGINT to the job, too.
        for job in jobs if number != signal.SIGINT else ():
            job.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        jobs.append(subprocess.Popen(command, env=environment))
        return jobs[0].wait()
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be started: {error.strerror or error}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _refuse_isolated(command: Sequence[str]) -> None:
    """Raises UsageError for a Python with an option that makes it ignore PYTHONPATH or sitecustomize."""
    if not pathlib.Path(command[0]).name.startswith("python"):
        return
    for word in command[1:]:
        if not word.startswith("-") or word.startswith(_WITH_VALUE):
            return
        if _ISOLATING.match(word):
            raise UsageError(f"{command[0]} {word} ignores the fixes: leave out this option")


def _summarize(fix: FrameworkFix, events: Iterable[Mapping[str, Any]]) -> FixReport:
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["kind"], []).append(event)
    calls = by_kind.get("called", [])
    callers = {event["rank"] for event in calls}
    world = max((event["world"] for event in calls), default=0)
    of_nodes = {
        rank
        for event in calls
        if "first_of_node" in event
        for rank in range(event["first_of_node"], event["first_of_node"] + event["ranks_of_node"])
    }
    return FixReport(
        id=fix.id,
        called=len(calls),
        left=len(by_kind.get("left", [])),
        callers=tuple(sorted(callers)),
        world=world,
        missing=tuple(sorted(of_nodes - callers)) if fix.on_every_rank else (),
        unheard=tuple(rank for rank in range(world) if fix.on_every_rank and rank not in callers | of_nodes),
        processes=len({event["process"] for event in by_kind.get("replaced", [])}),
        overridden=tuple(dict.fromkeys(event["by"] for event in by_kind.get("overridden", []))),
        verified={
            event["rank"]: (event["tensors"], tuple(event["differences"])) for event in by_kind.get("verified", [])
        },
    )
