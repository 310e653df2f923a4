"""One rank's supervisor: it carries out the conductor's instructions with its own worker, and posts the outcome.

Supervisors communicate only over the ranks' store. A supervisor makes no CUDA context and runs no case, so that no case
can crash it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from typing_extensions import assert_never

from fsdp_doctor.machine.launch import Place
from fsdp_doctor.machine.signals import Interruption
from fsdp_doctor.probe import worker
from fsdp_doctor.probe.deadlines import Limits
from fsdp_doctor.probe.job import Job
from fsdp_doctor.probe.messages import (
    INSTRUCTIONS,
    EndRun,
    Instruction,
    RetireWorker,
    RunCase,
    StartWorker,
    StopWorker,
    decode,
    encode,
)
from fsdp_doctor.probe.worker import import_frameworks
from fsdp_doctor.probe.workers import IDLE_POLL, LONG_POLL, SHORT_PHASE, SHORT_POLL, WorkerProcess
from fsdp_doctor.verdict.records import RankReport, Record

if TYPE_CHECKING:
    import torch.distributed as dist

_SUSPENDED_SECONDS = 6.0


class Round:
    """A start or a case on all ranks: the messages that the ranks exchange over the store until all have reported.

    All supervisors count the rounds, so that they use the same keys. No method waits for another rank.
    """

    def __init__(self, store: dist.Store, number: int, world_size: int) -> None:
        self._store = store
        self._prefix = f"round/{number}"
        self._ranks = range(world_size)
        self._began = time.monotonic()

    def count_seconds(self) -> float:
        """Returns the seconds since this rank began the round."""
        return time.monotonic() - self._began

    def post(self, report: RankReport) -> None:
        """Posts the rank's report, which means that the rank has finished the round."""
        self._store.set(self._make_report_key(report.rank), encode(report))

    def have_posted(self, ranks: Iterable[int]) -> bool:
        keys = [self._make_report_key(rank) for rank in ranks]
        return not keys or bool(self._store.check(keys))

    def is_over(self) -> bool:
        return self.have_posted(self._ranks)

    def have_others_posted(self, rank: int) -> bool:
        """Returns whether every rank but this one has posted its report; True if there is no other rank."""
        return self.have_posted(other for other in self._ranks if other != rank)

    def read_reports(self) -> list[RankReport]:
        """Returns the reports of all ranks. Must be called after the round is over."""
        return [decode(self._store.get(self._make_report_key(rank)), (RankReport,)) for rank in self._ranks]

    def report_trouble(self, rank: int) -> None:
        """Reports that the rank can keep the others from finishing."""
        self._store.set(f"{self._prefix}/trouble", str(rank))

    def is_in_trouble(self) -> bool:
        """Returns whether some rank can keep the others from finishing."""
        return bool(self._store.check([f"{self._prefix}/trouble"]))

    def order_stop(self, stop: StopWorker) -> None:
        """Orders the supervisors to end every worker that has not finished. Called by the conductor."""
        self._store.set(f"{self._prefix}/stop", encode(stop))

    def stop(self) -> StopWorker | None:
        """Returns the conductor's order to stop; None if there is no order yet."""
        key = f"{self._prefix}/stop"
        return decode(self._store.get(key), (StopWorker,)) if self._store.check([key]) else None

    def report_idle(self, rank: int, seconds: float) -> None:
        """Reports for how long the rank's worker has been idle."""
        self._store.set(self._make_idle_key(rank), str(seconds))

    def read_idle_seconds(self) -> float:
        """Returns for how many seconds all unfinished workers have been idle; 0 if one of them has not reported."""
        working = [rank for rank in self._ranks if not self.have_posted([rank])]
        if not working or not self._store.check([self._make_idle_key(rank) for rank in working]):
            return 0.0
        return min(float(self._store.get(self._make_idle_key(rank))) for rank in working)

    def _make_report_key(self, rank: int) -> str:
        return f"{self._prefix}/report/{rank}"

    def _make_idle_key(self, rank: int) -> str:
        return f"{self._prefix}/idle/{rank}"


class Supervisor:
    """Supervises one worker at a time. Single-threaded: :meth:`tick` must be called repeatedly.

    round: the start or case that was begun last; None before the first round.
    """

    def __init__(self, place: Place, job: Job, limits: Limits, store: dist.Store, interruption: Interruption) -> None:
        self.place = place
        self.job = job
        self.limits = limits
        self.store = store
        self.round: Round | None = None
        self._interruption = interruption
        self._worker: WorkerProcess | None = None
        self._num_rounds = 0
        self._reported_trouble = False
        self._posted = True
        self._posted_at = 0.0
        self._reported_idle_at = 0.0
        self._looked_for_stop_at = 0.0
        self._stop_seen_at: float | None = None
        import_frameworks(job, limits.start)

    def follow(self) -> None:
        """Carries out the conductor's instructions until the conductor ends the run. Called on every rank but 0."""
        number = 1
        while not isinstance(instruction := self._read_instruction(number), EndRun):
            self.perform(instruction)
            while not self.tick():
                pass
            number += 1

    def perform(self, instruction: Instruction) -> None:
        """Begins one instruction. Calls of :meth:`tick` then complete it."""
        match instruction:
            case StartWorker():
                run = functools.partial(worker.run, self.place, self.job, instruction)
                self._worker = WorkerProcess(self.place.rank, run)
                self._open_round()
            case RunCase():
                assert self._worker is not None
                self._worker.begin(str(instruction.number))
                self._open_round()
            case RetireWorker() | EndRun():
                self.close()
            case _:
                assert_never(instruction)

    def tick(self) -> bool:
        """Checks the worker and the store once. Returns whether this rank's report is posted."""
        self._poll()
        if self._posted:
            return True
        process, round_ = self._worker, self.round
        assert process is not None
        assert round_ is not None
        if not process.settled:
            process.keep_within(self.limits.host_bytes)
            # Tells the conductor from time to time for how long the worker has been idle.
            if self.limits.stage is None and round_.count_seconds() - self._reported_idle_at > IDLE_POLL:
                self._reported_idle_at = round_.count_seconds()
                round_.report_idle(self.place.rank, process.measure_idle_seconds())
        if process.in_trouble and not self._reported_trouble:
            self._reported_trouble = True
            round_.report_trouble(self.place.rank)
        # Each record of the worker ends a wait; the store, which is asked over a socket, is not asked as often.
        if not process.settled and time.monotonic() - self._looked_for_stop_at > LONG_POLL:
            self._looked_for_stop_at = time.monotonic()
            stop = round_.stop()
            if stop is not None and not self._must_wait_for_the_others(process, round_):
                process.stop(stop.why, stop.detail)
        if process.settled:
            round_.post(process.make_report())
            self._posted, self._posted_at = True, time.monotonic()
        return self._posted

    def read_last_record(self) -> Record | None:
        """Returns the last record of this rank's worker; None if there is none."""
        return self._worker.record if self._worker is not None else None

    def close(self) -> None:
        """Ends the worker, if there is one."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _read_instruction(self, number: int) -> Instruction:
        key = f"instruction/{number}"
        while not self.store.check([key]):
            self._poll()
        return decode(self.store.get(key), INSTRUCTIONS)

    def _open_round(self) -> None:
        self._num_rounds += 1
        self.round = Round(self.store, self._num_rounds, self.place.world_size)
        self._posted = self._reported_trouble = False
        self._reported_idle_at = 0.0
        self._stop_seen_at = None

    def _poll(self) -> None:
        self._interruption.check()
        # A message from the worker ends the wait at once, but reports of other ranks are only found by polling.
        waits_for_others = self._posted and time.monotonic() - self._posted_at < SHORT_PHASE
        seconds = SHORT_POLL if waits_for_others else LONG_POLL
        if self._worker is not None:
            self._worker.pump(seconds)
        else:
            time.sleep(seconds)

    def _must_wait_for_the_others(self, process: WorkerProcess, round_: Round) -> bool:
        """Returns whether the other ranks' workers must be stopped before this rank's suspended worker.

        A suspended worker is woken to write its stack. If the other workers still ran, the woken worker would let their
        collectives finish.
        """
        if self._stop_seen_at is None:
            self._stop_seen_at = time.monotonic()
        if not process.suspended or time.monotonic() - self._stop_seen_at > _SUSPENDED_SECONDS:
            return False
        return not round_.have_others_posted(self.place.rank)
