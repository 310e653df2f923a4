"""The workers of all ranks on one node, looked after by one process without a store between."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from fsdp_doctor.probe.deadlines import Deadlines
from fsdp_doctor.probe.instructions import StopWorker
from fsdp_doctor.probe.job import Limits
from fsdp_doctor.probe.watch import Watch
from fsdp_doctor.probe.worker import WorkerEnds
from fsdp_doctor.probe.worker_process import WorkerProcess
from fsdp_doctor.verdict.records import PhaseReport, RankReport, Record

# As those of a supervisor, and for the same reason.
_SHORT_POLL, _LONG_POLL, _SHORT_PHASE = 0.002, 0.02, 0.3
_IDLE_POLL = 0.5


class WorkerGroup:
    """Forks a worker for each rank at once; :meth:`close` ends them.

    runs: each rank's whole life, called in its fork. check: called again and again while the group is waited for; what
    it raises ends the wait.
    """

    def __init__(
        self,
        runs: Sequence[Callable[[WorkerEnds], None]],
        limits: Limits,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits
        self._deadlines = Deadlines(limits)
        self._check = check
        self._workers: list[WorkerProcess] = []
        self._idle_seconds = 0.0
        try:
            for rank, run in enumerate(runs):
                self._workers.append(WorkerProcess(rank, run))
        except BaseException:
            self.close()
            raise

    def started(self) -> list[RankReport]:
        """Every rank's report once all are ready, have refused, ended, or were stopped."""
        return self._reports(self._deadlines)

    def perform(self, command: str, timeout: float | None = None) -> list[RankReport]:
        """Gives every worker the command; every rank's report once all are through with it, or were stopped.

        timeout: seconds without progress, in place of those that the group's limits give a start or a test.
        """
        for worker in self._workers:
            worker.begin(command)
        if timeout is None:
            return self._reports(self._deadlines)
        return self._reports(Deadlines(dataclasses.replace(self._limits, start=timeout)))

    def phase_reports(self) -> list[PhaseReport | None]:
        """What pytest said on each rank of the last command."""
        return [worker.phase_report for worker in self._workers]

    def end(self, seconds: float) -> None:
        """Lets all workers end by themselves, and ends those that have not after that time."""
        for worker in self._workers:
            worker.let_go()
        end = time.monotonic() + seconds
        while not all(worker.ended for worker in self._workers) and time.monotonic() < end:
            for worker in self._workers:
                worker.pump(_LONG_POLL / len(self._workers))
        self.close()

    def close(self) -> None:
        """Ends all workers, and all that they have started."""
        for worker in self._workers:
            worker.kill()

    def _reports(self, deadlines: Deadlines) -> list[RankReport]:
        began = asked_at = time.monotonic()
        watch = Watch(deadlines, self._limits.grace, self._records())
        self._idle_seconds = 0.0
        while working := [worker for worker in self._workers if not worker.settled]:
            self._check()
            now = time.monotonic()
            poll = _SHORT_POLL if now - began < _SHORT_PHASE else _LONG_POLL
            for worker in self._workers:
                worker.pump(poll / len(self._workers))
                worker.keep_within(self._limits.host_bytes)
            if now - asked_at > _IDLE_POLL:
                asked_at = now
                self._idle_seconds = min(worker.idle_seconds() for worker in working)
            stop = watch.look(self._records(), self._is_in_trouble, lambda: self._idle_seconds)
            if stop is not None:
                self._stop(stop)
        return [worker.report() for worker in self._workers]

    def _records(self) -> list[Record | None]:
        return [worker.record for worker in self._workers]

    def _is_in_trouble(self) -> bool:
        return any(worker.in_trouble for worker in self._workers)

    def _stop(self, stop: StopWorker) -> None:
        """A suspended worker is woken for its stack and would then let the others' collectives finish."""
        for worker in sorted(self._workers, key=lambda worker: worker.suspended):
            worker.stop(stop.why, stop.detail)
