"""The run itself, on rank 0: case after case, in workers that are replaced when they are not whole."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

from fsdp_doctor.errors import DoctorFault
from fsdp_doctor.matrix.cases import AnyCase, AnyScenario, Case
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.paths import find_path
from fsdp_doctor.probe.conductor import Conductor
from fsdp_doctor.probe.instructions import Task
from fsdp_doctor.probe.savers import Savers
from fsdp_doctor.report.document import CaseResult, result_of
from fsdp_doctor.verdict.classification import Verdict, classify, died_before, workers_are_whole
from fsdp_doctor.verdict.records import RankReport, Stage

_BEFORE_THE_PATH: tuple[Stage, ...] = ("checkpoint", "build", "reference", "offload", "staging")


def results(
    conductor: Conductor,
    cases: Sequence[AnyCase],
    numbers: Sequence[int],
    *,
    savers: Savers,
    world_size: int,
    confirm: bool,
    scenarios_apart: bool = False,
) -> Iterator[CaseResult]:
    """Yields a result for each numbered case, in order. Numbers are places in ``cases``, the job's list.

    scenarios_apart: each gets fresh workers, which hold nothing of another's.
    """
    unbuildable: dict[tuple[AnyScenario, bool], str] = {}
    before: AnyScenario | None = None
    for number in numbers:
        case = cases[number]
        if scenarios_apart and before not in (None, case.scenario):
            conductor.retire()
        before = case.scenario
        built = (case.scenario, _without_mesh(case))
        if built in unbuildable:
            yield CaseResult(case=case, verdict=Verdict(kind="skipped", reason=unbuildable[built]))
            continue
        if (lacking := savers.result_without(number)) is not None:
            yield lacking
            continue
        result = _examine(conductor, number, case, world_size)
        if confirm and result.verdict.bad:
            conductor.retire()
            again = _examine(conductor, number, case, world_size)
            result = _confirmed(result, again)
        if result.verdict.kind in ("crash", "hang") and _failed_before_the_path(result.ranks):
            unbuildable[built] = f"its scenario failed before any path could run: see {case.id}"
        yield result


def _without_mesh(case: AnyCase) -> bool:
    return isinstance(case, Case) and find_path(case.path, case.scenario.version).without_mesh


def _examine(conductor: Conductor, number: int, case: AnyCase, world_size: int) -> CaseResult:
    """Runs one case, in the present generation if it is whole and can run it.

    What the cases before it left can end a case before its path runs. Then it gets a second chance, in
    fresh workers.
    """
    start = time.monotonic()
    if isinstance(case, FrameworkCase) and case.way.kind == "resume":
        reports = _save(conductor, number, case)
        verdict = classify(reports, world_size)
        if verdict.kind != "ok":
            return result_of(case, verdict, reports, time.monotonic() - start)
    for _ in range(2):
        if conductor.generation != case.scenario.generation:
            conductor.retire()
            _start(conductor, case)
        used = conductor.used
        reports = conductor.run(number)
        verdict = classify(reports, world_size)
        blameless = died_before(reports) or (used and verdict.bad and _failed_before_the_path(reports))
        if blameless or not workers_are_whole(reports):
            conductor.retire()
        if not blameless:
            break
    return result_of(case, verdict, reports, time.monotonic() - start)


def _save(conductor: Conductor, number: int, case: AnyCase) -> list[RankReport]:
    """Has a generation of its own do the first half of a case whose second half is another process's."""
    conductor.retire()
    _start(conductor, case, task="save")
    reports = conductor.run(number)
    conductor.retire()
    return reports


def _start(conductor: Conductor, case: AnyCase, task: Task = "run") -> None:
    """A generation that does not start may have met the last one's leavings: it is tried twice."""
    try:
        conductor.start(case, task)
    except DoctorFault:
        conductor.retire()
        conductor.start(case, task)


def _failed_before_the_path(reports: Sequence[RankReport]) -> bool:
    reached = [report.record.stage for report in reports if report.record is not None]
    return bool(reached) and all(stage in _BEFORE_THE_PATH for stage in reached)


def _confirmed(first: CaseResult, again: CaseResult) -> CaseResult:
    wall_seconds = round(first.wall_seconds + again.wall_seconds, 4)
    return dataclasses.replace(first, wall_seconds=wall_seconds, confirmation=again.verdict)
