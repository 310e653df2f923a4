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
from fsdp_doctor.verdict.classification import Verdict, classify, died_before, judged_refusal, workers_are_whole
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
    examiner = _Examiner(conductor, cases, world_size)
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
        result = examiner.examine(number)
        if confirm and result.verdict.bad:
            conductor.retire()
            result = _confirmed(result, examiner.examine(number))
        if result.verdict.kind in ("crash", "hang") and _failed_before_the_path(result.ranks):
            unbuildable[built] = f"its scenario failed before any path could run: see {case.id}"
        yield result


def _without_mesh(case: AnyCase) -> bool:
    return isinstance(case, Case) and find_path(case.path, case.scenario.version).without_mesh


def with_exact_checkpoints(cases: Sequence[AnyCase]) -> tuple[AnyCase, ...]:
    """The cases, and after them those that a refusal of theirs is judged by."""
    misfits = (case for case in cases if isinstance(case, Case) and not case.scenario.checkpoint.must_load)
    return tuple(dict.fromkeys([*cases, *(case.with_exact_checkpoint for case in misfits)]))


class _Examiner:
    """Runs one case after the other. cases: the job's list, in which each has its number."""

    def __init__(self, conductor: Conductor, cases: Sequence[AnyCase], world_size: int) -> None:
        self._conductor = conductor
        self._cases = cases
        self._world_size = world_size
        self._verdicts: dict[AnyCase, Verdict] = {}

    def examine(self, number: int) -> CaseResult:
        """Runs the case of that number, and where it was refused the one that the refusal is judged by."""
        start = time.monotonic()
        case = self._cases[number]
        verdict, reports = self._run(number)
        if isinstance(case, Case) and verdict.kind == "refused":
            exact = case.with_exact_checkpoint
            if exact not in self._verdicts:
                self.examine(self._cases.index(exact))
            verdict = judged_refusal(verdict, self._verdicts[exact], self._world_size)
        self._verdicts[case] = verdict
        return result_of(case, verdict, reports, time.monotonic() - start)

    def _run(self, number: int) -> tuple[Verdict, list[RankReport]]:
        """In the present generation if it is whole and can run the case.

        What the cases before it left can end a case before its path runs. Then it gets a second chance, in
        fresh workers.
        """
        conductor, case = self._conductor, self._cases[number]
        if isinstance(case, FrameworkCase) and case.way.kind == "resume":
            reports = _save(conductor, number, case)
            verdict = classify(reports, self._world_size)
            if verdict.kind != "ok":
                return verdict, reports
        for _ in range(2):
            if conductor.generation != case.scenario.generation:
                conductor.retire()
                _start(conductor, case)
            used = conductor.used
            reports = conductor.run(number)
            verdict = classify(reports, self._world_size)
            blameless = died_before(reports) or (used and verdict.bad and _failed_before_the_path(reports))
            if blameless or not workers_are_whole(reports):
                conductor.retire()
            if not blameless:
                break
        return verdict, reports


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
