"""One rank's supervisor: it performs the conductor's instructions on its own worker and posts what came of them.

Supervisors agree over torchrun's own store and nothing else. A supervisor makes no CUDA context and
runs no case, so that nothing a case does can take it along.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch.distributed as dist
from typing_extensions import assert_never

from fsdp_doctor.errors import Interrupted
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.probe.instructions import (
    EndRun,
    Instruction,
    RetireWorker,
    RunCase,
    StartWorker,
    instruction_from_json,
)
from fsdp_doctor.probe.job import Job, Limits
from fsdp_doctor.probe.round import Round
from fsdp_doctor.probe.worker import import_frameworks
from fsdp_doctor.probe.worker_process import WorkerProcess
from fsdp_doctor.verdict.records import Record

# The first polls of a round are short, so that the supervisors add little to a case of some
# milliseconds; later ones are long, so that they leave the processor to the workers.
_SHORT_POLL, _LONG_POLL, _SHORT_PHASE = 0.002, 0.02, 0.3
_IDLE_POLL = 0.5
_SUSPENDED_SECONDS = 6.0


class Interruption:
    """Turns SIGINT, SIGTERM and SIGHUP into an exception at the next safe point."""

    def __init__(self) -> None:
        self._received: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def check(self) -> None:
        """Raises Interrupted if a signal came."""
        if self._received is not None:
            raise Interrupted(f"stopped by {signal.Signals(self._received).name}")


class Supervisor:
    """Looks after one worker at a time. Single-threaded: :meth:`tick` must be called again and again.

    round: the start or case that was begun last; None before the first one.
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
        self._told_trouble = False
        self._posted = True
        self._told_idle_at = 0.0
        self._stop_seen_at: float | None = None
        import_frameworks(job, limits.start)

    def follow(self) -> None:
        """Performs the conductor's instructions until it ends the run. For every rank but 0."""
        number = 1
        while not isinstance(instruction := self._instruction(number), EndRun):
            self.perform(instruction)
            while not self.tick():
                pass
            number += 1

    def perform(self, instruction: Instruction) -> None:
        """Begins one instruction; :meth:`tick` then brings it to its end."""
        match instruction:
            case StartWorker():
                self._worker = WorkerProcess(self.place, self.job, instruction)
                self._open_round()
            case RunCase():
                assert self._worker is not None
                self._worker.begin(instruction.number)
                self._open_round()
            case RetireWorker() | EndRun():
                self.close()
            case _:
                assert_never(instruction)

    def tick(self) -> bool:
        """One look at the worker and at the store. True once this rank's report is posted."""
        self._poll()
        if self._posted:
            return True
        worker, round_ = self._worker, self.round
        assert worker is not None
        assert round_ is not None
        if not worker.settled:
            worker.keep_within(self.limits.host_bytes)
            self._watch_activity(worker, round_)
        if worker.in_trouble and not self._told_trouble:
            self._told_trouble = True
            round_.tell_trouble(self.place.rank)
        if not worker.settled:
            stop = round_.stop()
            if stop is not None and not self._must_wait_for_the_others(worker, round_):
                worker.stop(stop.why, stop.detail)
        if worker.settled:
            round_.post(worker.report())
            self._posted = True
        return self._posted

    def last_record(self) -> Record | None:
        """What this rank's worker said last of its case."""
        return self._worker.record if self._worker is not None else None

    def close(self) -> None:
        """Ends the worker, if there is one."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _instruction(self, number: int) -> Instruction:
        key = f"instruction/{number}"
        while not self.store.check([key]):
            self._poll()
        return instruction_from_json(self.store.get(key))

    def _open_round(self) -> None:
        self._num_rounds += 1
        self.round = Round(self.store, self._num_rounds, self.place.world_size)
        self._posted = self._told_trouble = False
        self._told_idle_at = 0.0
        self._stop_seen_at = None

    def _poll(self) -> None:
        self._interruption.check()
        seconds = _SHORT_POLL if self.round is not None and self.round.seconds() < _SHORT_PHASE else _LONG_POLL
        if self._worker is not None:
            self._worker.pump(seconds)
        else:
            time.sleep(seconds)

    def _watch_activity(self, worker: WorkerProcess, round_: Round) -> None:
        """Tells the conductor now and then for how long the worker has done nothing."""
        if self.limits.stage is None and round_.seconds() - self._told_idle_at > _IDLE_POLL:
            self._told_idle_at = round_.seconds()
            round_.tell_idle(self.place.rank, worker.idle_seconds())

    def _must_wait_for_the_others(self, worker: WorkerProcess, round_: Round) -> bool:
        """A suspended worker is woken for its stack, and would then let the others' collectives finish:
        they are stopped first."""
        if self._stop_seen_at is None:
            self._stop_seen_at = time.monotonic()
        if not worker.suspended or time.monotonic() - self._stop_seen_at > _SUSPENDED_SECONDS:
            return False
        return not round_.others_are_through(self.place.rank)
