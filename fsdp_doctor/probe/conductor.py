"""Rank 0's supervisor gives the instructions, performs its own part of them, and gathers all ranks' reports.

The instructions go over the store: start a generation of workers, run a case, retire the generation, end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fsdp_doctor.errors import CannotRun, DoctorFault, FsdpDoctorError, UsageError
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.probe.deadlines import Deadlines, RoundStage
from fsdp_doctor.probe.instructions import (
    EndRun,
    Instruction,
    RetireWorker,
    RunCase,
    StopWorker,
    Task,
    start_for,
    to_json,
)
from fsdp_doctor.probe.round import Round
from fsdp_doctor.probe.supervisor import Supervisor
from fsdp_doctor.verdict.records import RankReport

_REPORT_SECONDS = 60.0
_IDLE_POLL = 0.25
# A look that comes later than this after the last one was held up by the machine, not by a worker.
_LATE_SECONDS = 1.0


class Conductor:
    """Every method that gives an instruction returns when all ranks have performed it.

    generation: what the present one is of, as scenarios name it; None where there is none.
    used: whether the present generation has run a case.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._deadlines = Deadlines(supervisor.limits)
        self._num_instructions = 0
        self._num_generations = 0
        self.generation: str | None = None
        self.used = False

    def start(self, case: AnyCase, task: Task = "run") -> list[RankReport]:
        """Starts a generation of workers on every rank that can run the case.

        Raises what the workers say if they cannot run here, DoctorFault if they end in the start.
        """
        self.generation, self.used = case.scenario.generation, False
        self._num_generations += 1
        self._instruct(start_for(case, self._num_generations, task))
        reports = self._gather()
        for report in reports:
            if report.refused is not None:
                raise _ERROR_OF.get(report.refused.exit_code, DoctorFault)(report.refused.reason)
        missing = sorted((report for report in reports if report.ready is None), key=lambda r: r.exit_time)
        if missing:
            raise DoctorFault(f"the worker of rank {missing[0].rank} did not start: {_how(missing[0])}")
        return reports

    def run(self, case_number: int) -> list[RankReport]:
        """Runs a case in the present generation; returns every rank's report."""
        self.used = True
        self._instruct(RunCase(number=case_number))
        return self._gather()

    def retire(self) -> None:
        """Ends the present generation on every rank, if there is one."""
        if self.generation is not None:
            self.generation = None
            self._instruct(RetireWorker())

    def end(self) -> None:
        """Lets the other supervisors go."""
        self._give(EndRun())

    def _instruct(self, instruction: Instruction) -> None:
        self._give(instruction)
        self._supervisor.perform(instruction)

    def _give(self, instruction: Instruction) -> None:
        self._num_instructions += 1
        self._supervisor.store.set(f"instruction/{self._num_instructions}", to_json(instruction))

    def _gather(self) -> list[RankReport]:
        round_ = self._supervisor.round
        assert round_ is not None
        watch = _Watch(self._supervisor, round_, self._deadlines)
        while not (self._supervisor.tick() and round_.is_over()):
            watch.look()
        return round_.reports()


class _Watch:
    """Decides when a round stands still, and has the workers stopped.

    Progress is any record of rank 0's worker: another stage, or another tensor now and then.
    """

    def __init__(self, supervisor: Supervisor, round_: Round, deadlines: Deadlines) -> None:
        self._supervisor = supervisor
        self._round = round_
        self._deadlines = deadlines
        self._record = supervisor.last_record()
        self._looked_at = time.monotonic()
        self._still = 0.0
        self._asked_at = 0.0
        self._trouble_at: float | None = None
        self._stopped_at: float | None = None

    def look(self) -> None:
        now = time.monotonic()
        if self._stopped_at is not None:
            if now - self._stopped_at > _REPORT_SECONDS:
                raise DoctorFault("a supervisor did not report in time, and it is not known on which rank")
            return
        self._still += min(now - self._looked_at, _LATE_SECONDS)
        self._looked_at = now
        self._look_for_progress()
        if self._trouble_at is None and self._round.is_in_trouble():
            self._trouble_at = now
        if self._trouble_at is not None and now - self._trouble_at > self._supervisor.limits.grace:
            self._stop(StopWorker(why="others", detail="still at it when another rank was in trouble"))
            return
        hung_for = self._hung_for()
        if hung_for is not None:
            detail = f"no progress in stage {self._stage} for {hung_for:g} s"
            self._stop(StopWorker(why="deadline", detail=detail))

    @property
    def _stage(self) -> RoundStage:
        return self._record.stage if self._record is not None else "start"

    def _look_for_progress(self) -> None:
        record = self._supervisor.last_record()
        if record is not self._record:
            if self._record is not None:
                self._deadlines.saw(self._still)
            self._record, self._still, self._asked_at = record, 0.0, 0.0

    def _hung_for(self) -> float | None:
        """The deadline in seconds, once it has passed."""
        deadline = self._deadlines.of(self._stage)
        if self._still > deadline.busy:
            return deadline.busy
        if deadline.idle is None or self._still <= deadline.idle or self._still - self._asked_at < _IDLE_POLL:
            return None
        self._asked_at = self._still
        return round(deadline.idle) if self._round.idle_seconds() >= deadline.idle else None

    def _stop(self, stop: StopWorker) -> None:
        self._stopped_at = time.monotonic()
        self._round.order_stop(stop)


_ERROR_OF: dict[int, Callable[[str], FsdpDoctorError]] = {2: UsageError, 3: CannotRun}


def _how(report: RankReport) -> str:
    output = report.output.strip().splitlines()[-1:]
    ending = report.exit or report.stopped_detail or "it said nothing readable"
    return ending + (f" ({output[0]})" if output else "")
