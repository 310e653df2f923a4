"""Rank 0's supervisor gives the instructions, performs its own part of them, and gathers all ranks' reports.

The instructions go over the store: start a generation of workers, run a case, retire the generation, end.
"""

from __future__ import annotations

import time

from fsdp_doctor.errors import DoctorFault
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.probe.deadlines import Deadlines
from fsdp_doctor.probe.instructions import (
    EndRun,
    Instruction,
    RetireWorker,
    RunCase,
    Task,
    start_for,
    to_json,
)
from fsdp_doctor.probe.readiness import check_ready
from fsdp_doctor.probe.supervisor import Supervisor
from fsdp_doctor.probe.watch import Watch
from fsdp_doctor.verdict.records import RankReport

_REPORT_SECONDS = 60.0


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
        check_ready(reports)
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
        watch = Watch(self._deadlines, self._supervisor.limits.grace, [self._supervisor.last_record()])
        stopped_at: float | None = None
        while not (self._supervisor.tick() and round_.is_over()):
            if stopped_at is not None:
                if time.monotonic() - stopped_at > _REPORT_SECONDS:
                    raise DoctorFault("a supervisor did not report in time, and it is not known on which rank")
                continue
            stop = watch.look([self._supervisor.last_record()], round_.is_in_trouble, round_.idle_seconds)
            if stop is not None:
                stopped_at = time.monotonic()
                round_.order_stop(stop)
        return round_.reports()
