"""Deadlines of workers: the time without progress after which they are stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.probe.messages import StopWorker
from fsdp_doctor.verdict.records import Record, Stage

# Before the first record of a case, or of a worker that is starting, there is no stage yet.
RoundStage: TypeAlias = Stage | Literal["start"]
# What takes long because the model is large, and not because something is stuck.
_GROWING_STAGES: tuple[RoundStage, ...] = ("start", "checkpoint", "build", "reference", "fingerprint", "verify")
_LEAST, _MOST = 5.0, 30.0
_TIMES_THE_LONGEST = 4.0
_IDLE_POLL = 0.25
# What the other ranks have to end by themselves once one is in trouble, and what is enough where they do nothing.
_GRACE, _IDLE_GRACE = 5.0, 2.0
# A look that comes later than this after the last one was held up by the machine, not by a worker.
_LATE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the time and the memory of a worker.

    start: seconds for starting a generation, for building a scenario and for the doctor's own work
        on it, which grow with the model.
    stage: seconds without progress elsewhere; None follows what the stages of this run have taken.
    grace: seconds that the other ranks have to end by themselves once one rank is in trouble; None: 5, and 2 where
        they do nothing.
    host_bytes: resident memory of one worker, None for no limit.
    """

    start: float = 300.0
    stage: float | None = None
    grace: float | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """Seconds without progress.

    idle: after which it is a hang if the workers of all ranks do nothing; None where that is no sign of one.
    busy: after which it is a hang whatever they do.
    """

    idle: float | None
    busy: float


class Deadlines:
    """The deadlines of one run. They grow with the slowest stage that the run has shown.

    test_timeout: the time limit of a test that has one; it replaces ``limits.start``.
    """

    def __init__(self, limits: Limits, *, test_timeout: float | None = None) -> None:
        self._stage_seconds = limits.stage
        self._most_seconds = limits.start if test_timeout is None else test_timeout
        self._longest = 0.0

    def note_progress(self, seconds: float) -> None:
        """Takes note that some stage of a case made progress after that time."""
        self._longest = max(self._longest, seconds)

    def choose(self, stage: RoundStage) -> Deadline:
        if stage in _GROWING_STAGES:
            return Deadline(idle=None, busy=self._most_seconds)
        if self._stage_seconds is not None:
            return Deadline(idle=None, busy=self._stage_seconds)
        idle = min(max(_LEAST, _TIMES_THE_LONGEST * self._longest), _MOST)
        # A test may do whatever it wants, as long as it does anything.
        return Deadline(idle=idle, busy=self._most_seconds if stage == "test" else _MOST)


class Watch:
    """Watches one round: a start, a case, or a phase of a test.

    Progress is any new record: another stage, or now and then another tensor.
    """

    def __init__(self, deadlines: Deadlines, grace: float | None, records: Sequence[Record | None]) -> None:
        self._deadlines = deadlines
        self._grace = grace
        self._records = records
        self._looked_at = time.monotonic()
        self._still = 0.0
        self._asked_at = 0.0
        self._trouble_at: float | None = None
        self._asked_in_trouble_at = 0.0

    def look(
        self, records: Sequence[Record | None], in_trouble: Callable[[], bool], idle_seconds: Callable[[], float]
    ) -> StopWorker | None:
        """Returns the order to stop the workers, once it is time for it.

        records: the last ones. in_trouble: whether some rank can keep the others from finishing. idle_seconds: for how
        long no unfinished worker has done anything.
        """
        now = time.monotonic()
        self._still += min(now - self._looked_at, _LATE_SECONDS)
        self._looked_at = now
        if any(new is not old for new, old in zip(records, self._records, strict=True)):
            if any(record is not None for record in self._records):
                self._deadlines.note_progress(self._still)
            self._records, self._still, self._asked_at = records, 0.0, 0.0
        if self._trouble_at is None and in_trouble():
            self._trouble_at = now
        if self._trouble_at is not None and self._is_grace_over(now - self._trouble_at, idle_seconds):
            return StopWorker(why="others", detail="still at it when another rank was in trouble")
        hung_for = self._find_passed_deadline(idle_seconds)
        if hung_for is None:
            return None
        return StopWorker(why="deadline", detail=f"no progress in stage {self._stage} for {hung_for:g} s")

    @property
    def _stage(self) -> RoundStage:
        records = [record for record in self._records if record is not None]
        unfinished = [record for record in records if not record.done]
        return (unfinished or records)[0].stage if records else "start"

    def _is_grace_over(self, seconds: float, idle_seconds: Callable[[], float]) -> bool:
        """seconds: since the trouble."""
        if self._grace is not None:
            return seconds > self._grace
        if seconds > _GRACE:
            return True
        if seconds <= _IDLE_GRACE or seconds - self._asked_in_trouble_at < _IDLE_POLL:
            return False
        self._asked_in_trouble_at = seconds
        return idle_seconds() >= _IDLE_GRACE

    def _find_passed_deadline(self, idle_seconds: Callable[[], float]) -> float | None:
        """The deadline in seconds, once it has passed."""
        deadline = self._deadlines.choose(self._stage)
        if self._still > deadline.busy:
            return deadline.busy
        if deadline.idle is None or self._still <= deadline.idle or self._still - self._asked_at < _IDLE_POLL:
            return None
        self._asked_at = self._still
        return round(deadline.idle) if idle_seconds() >= deadline.idle else None
