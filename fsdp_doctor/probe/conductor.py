"""Conducts the run on rank 0: runs case after case in generations of workers, and replaces broken generations.

The conductor sends instructions over the store: start a generation of workers, run a case, retire the generation, end
the run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence

from fsdp_doctor.errors import DoctorFault
from fsdp_doctor.matrix.cases import AnyCase, AnyScenario, Case
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.methods import find_method
from fsdp_doctor.probe.checkpoint_writers import CheckpointWriters
from fsdp_doctor.probe.deadlines import Deadlines, Watch
from fsdp_doctor.probe.messages import EndRun, Instruction, RetireWorker, RunCase, StartWorker, Task, encode
from fsdp_doctor.probe.supervisor import Supervisor
from fsdp_doctor.probe.workers import check_ready
from fsdp_doctor.report.document import CaseResult, make_result
from fsdp_doctor.verdict.classification import Verdict, are_workers_whole, classify, has_died_before, judge_refusal
from fsdp_doctor.verdict.records import RankReport, Stage

_REPORT_SECONDS = 60.0
_BEFORE_THE_METHOD: set[Stage] = {"checkpoint", "build", "reference", "offload", "staging"}


class Conductor:
    """Sends instructions to the supervisors, carries out rank 0's part of them, and gathers the reports of all ranks.

    A method that sends an instruction returns after all ranks have carried it out.

    generation: the name of the current generation of workers, given by the scenario that it was started for; None
        between generations.
    unavailable: maps a framework to the reason why none of its cases can run.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._deadlines = Deadlines(supervisor.limits)
        self._num_instructions = 0
        self._num_generations = 0
        self.generation: str | None = None
        self.has_run_a_case = False
        self.unavailable: dict[str, str] = {}

    def start(self, case: AnyCase, task: Task = "run") -> list[RankReport]:
        """Starts a generation of workers that can run the case, on every rank.

        Raises the workers' error if they cannot run here, and DoctorFault if they end while they start.
        """
        self.generation, self.has_run_a_case = case.scenario.generation, False
        self._num_generations += 1
        self._instruct(StartWorker.for_case(case, self._num_generations, task))
        reports = self._gather()
        check_ready(reports)
        reasons = {report.ready.unavailable for report in reports if report.ready and report.ready.unavailable}
        if isinstance(case, FrameworkCase) and reasons:
            self.unavailable[case.scenario.framework] = "; ".join(sorted(reasons))
        return reports

    def run(self, case_number: int) -> list[RankReport]:
        """Runs a case in the current generation. Returns the report of every rank."""
        self.has_run_a_case = True
        self._instruct(RunCase(number=case_number))
        return self._gather()

    def retire(self) -> None:
        """Ends the current generation on every rank, if there is one."""
        if self.generation is not None:
            self.generation = None
            self._instruct(RetireWorker())

    def end(self) -> None:
        """Tells the other supervisors that the run has ended."""
        self._give(EndRun())

    def _instruct(self, instruction: Instruction) -> None:
        self._give(instruction)
        self._supervisor.perform(instruction)

    def _give(self, instruction: Instruction) -> None:
        self._num_instructions += 1
        self._supervisor.store.set(f"instruction/{self._num_instructions}", encode(instruction))

    def _gather(self) -> list[RankReport]:
        supervisor, round_ = self._supervisor, self._supervisor.round
        assert round_ is not None
        watch = Watch(self._deadlines, supervisor.limits.grace, [supervisor.read_last_record()])
        stopped_at: float | None = None
        while not (supervisor.tick() and round_.is_over()):
            if stopped_at is not None:
                if time.monotonic() - stopped_at > _REPORT_SECONDS:
                    raise DoctorFault("a supervisor did not report in time; its rank is not known")
            elif stop := watch.look([supervisor.read_last_record()], round_.is_in_trouble, round_.read_idle_seconds):
                stopped_at = time.monotonic()
                round_.order_stop(stop)
        return round_.read_reports()


def run_cases(
    conductor: Conductor,
    cases: Sequence[AnyCase],
    numbers: Iterable[int],
    *,
    writers: CheckpointWriters,
    world_size: int,
    confirm: bool,
    scenarios_apart: bool = False,
) -> Iterator[CaseResult]:
    """Yields a result for each numbered case, in order. A number is an index into ``cases``, the job's list.

    confirm: whether each bad case runs a second time, in new workers.
    scenarios_apart: whether each scenario gets new workers, so that no other scenario holds memory in them.
    """
    examiner = _Examiner(conductor, cases, world_size)
    unbuildable: dict[tuple[AnyScenario, bool, bool], str] = {}
    before: AnyScenario | None = None
    for number in numbers:
        case = cases[number]
        if scenarios_apart and before not in (None, case.scenario):
            conductor.retire()
        before = case.scenario
        without_mesh = isinstance(case, Case) and find_method(case.method, case.scenario.version).without_mesh
        built = (case.scenario, without_mesh, isinstance(case, FrameworkCase) and case.is_built_fixed)
        if built in unbuildable:
            yield make_result(case, Verdict(kind="skipped", reason=unbuildable[built]))
            continue
        if (no_checkpoint := writers.write_for(number)) is not None:
            yield no_checkpoint
            continue
        result = examiner.examine(number)
        if confirm and result.verdict.bad:
            conductor.retire()
            again = examiner.examine(number)
            wall_seconds = round(result.wall_seconds + again.wall_seconds, 4)
            result = dataclasses.replace(result, wall_seconds=wall_seconds, confirmation=again.verdict)
        if result.verdict.kind in ("crash", "hang") and _has_failed_before_the_method(result.ranks):
            unbuildable[built] = f"its scenario failed before any method could run: see {case.id}"
        yield result


def add_cases_that_must_work(cases: Sequence[AnyCase]) -> tuple[AnyCase, ...]:
    """Returns the cases, followed by the cases that must work, which are needed to judge refusals."""
    matrix = [case for case in cases if isinstance(case, Case)]
    misfits = [case for case in matrix if not (case.scenario.must_load and case.scenario.must_extract)]
    return tuple(dict.fromkeys([*cases, *(case.that_must_work for case in misfits)]))


class _Examiner:
    """Runs one case after another.

    cases: the job's list; a case's number is its index.
    """

    def __init__(self, conductor: Conductor, cases: Sequence[AnyCase], world_size: int) -> None:
        self._conductor = conductor
        self._cases = cases
        self._world_size = world_size
        self._verdicts: dict[AnyCase, Verdict] = {}
        # Maps a framework's scenario that cannot be built to its verdict.
        self._unsupported: dict[AnyScenario, Verdict] = {}

    def examine(self, number: int) -> CaseResult:
        """Runs the case with this number, and returns the result.

        If every rank refuses, also runs the case by which a refusal is judged.
        """
        start = time.monotonic()
        case = self._cases[number]
        verdict, reports = self._run(number)
        if isinstance(case, Case) and verdict.kind == "refused":
            exact = case.that_must_work
            if exact not in self._verdicts:
                self.examine(self._cases.index(exact))
            verdict = judge_refusal(verdict, self._verdicts[exact], self._world_size)
        self._verdicts[case] = verdict
        return make_result(case, verdict, reports, time.monotonic() - start)

    def _run(self, number: int) -> tuple[Verdict, list[RankReport]]:
        """Runs the case in the current generation of workers, or in a new generation if the workers cannot run it.

        Returns the verdict and the reports of all ranks. Remains of earlier cases can end a case before its method
        runs. Such a case runs a second time, in new workers.
        """
        conductor, case = self._conductor, self._cases[number]
        if isinstance(case, FrameworkCase) and (reason := conductor.unavailable.get(case.scenario.framework)):
            return Verdict(kind="unsupported", reason=reason), []
        if case.scenario in self._unsupported:
            return self._unsupported[case.scenario], []
        if isinstance(case, FrameworkCase) and case.definition.kind == "resume":
            # A separate generation of workers runs the first half of the case.
            conductor.retire()
            self._start(case, task="save")
            reports = conductor.run(number)
            conductor.retire()
            verdict = classify(reports, self._world_size)
            if verdict.kind != "ok":
                return verdict, reports
        for _ in range(2):
            if conductor.generation != case.scenario.generation:
                conductor.retire()
                self._start(case)
            used = conductor.has_run_a_case
            reports = conductor.run(number)
            verdict = classify(reports, self._world_size)
            blameless = has_died_before(reports) or (used and verdict.bad and _has_failed_before_the_method(reports))
            if blameless or not are_workers_whole(reports):
                conductor.retire()
            if not blameless:
                break
        # A refused fix says nothing about a session without it.
        is_plain = isinstance(case, FrameworkCase) and not case.is_fixed
        if is_plain and verdict.kind == "unsupported" and _read_stages(reports) == {"build"}:
            self._unsupported[case.scenario] = verdict
        return verdict, reports

    def _start(self, case: AnyCase, task: Task = "run") -> None:
        """Starts a generation of workers.

        If that fails, tries once more, because remains of the last generation may be the reason.
        """
        try:
            self._conductor.start(case, task)
        except DoctorFault:
            self._conductor.retire()
            self._conductor.start(case, task)


def _has_failed_before_the_method(reports: Sequence[RankReport]) -> bool:
    return set() < _read_stages(reports) <= _BEFORE_THE_METHOD


def _read_stages(reports: Sequence[RankReport]) -> set[Stage]:
    """Returns the last stage that each rank's worker reached, as a set."""
    return {report.record.stage for report in reports if report.record is not None}
