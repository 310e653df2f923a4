"""Deadlines of workers: the time without progress after which workers are stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.probe.messages import StopWorker
from fsdp_doctor.verdict.records import Record, Stage

# Before the first record of a case, or of a worker that is starting, there is no stage yet.
RoundStage: TypeAlias = Stage | Literal["start"]
# Stages that can take long because the model is large, without being stuck.
_GROWING_STAGES: tuple[RoundStage, ...] = ("start", "checkpoint", "build", "reference", "fingerprint", "verify")
_LEAST, _MOST = 5.0, 30.0
_TIMES_THE_LONGEST = 4.0
_IDLE_POLL = 0.25
# Seconds that the other ranks have to end by themselves once one rank is in trouble; fewer if they are idle.
_GRACE, _IDLE_GRACE = 5.0, 1.0
# If more time than this passes between two looks, the machine delayed the second look, not a worker.
_LATE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the time and the memory of a worker.

    start: seconds without progress while workers start, a model is built, or fsdp-doctor itself works on the model;
        these stages take longer with a larger model.
    stage: seconds without progress in any other stage; None derives the limit from the durations of this run's stages.
    grace: seconds that the other ranks have to end by themselves once one rank is in trouble; None means 5, or 1 if
        they are idle.
    host_bytes: the most resident memory of one worker; None for no limit.
    """

    start: float = 300.0
    stage: float | None = None
    grace: float | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """The seconds without progress after which a stage counts as a hang.

    idle: the limit if the workers of all ranks are idle; None if being idle is not a sign of a hang.
    busy: the limit whatever the workers do.
    """

    idle: float | None
    busy: float


class Deadlines:
    """The deadlines of one run. They grow with the slowest stage of the run so far.

    test_timeout: the time limit that a test sets, which replaces ``limits.start``; None if the test sets none.
    """

    def __init__(self, limits: Limits, *, test_timeout: float | None = None) -> None:
        self._stage_seconds = limits.stage
        self._most_seconds = limits.start if test_timeout is None else test_timeout
        self._longest = 0.0

    def note_progress(self, seconds: float) -> None:
        """Notes that a stage of a case made progress after ``seconds`` without progress."""
        self._longest = max(self._longest, seconds)

    def choose(self, stage: RoundStage) -> Deadline:
        if stage in _GROWING_STAGES:
            return Deadline(idle=None, busy=self._most_seconds)
        if self._stage_seconds is not None:
            return Deadline(idle=None, busy=self._stage_seconds)
        idle = min(max(_LEAST, _TIMES_THE_LONGEST * self._longest), _MOST)
        # A test may do anything, as long as it is not idle.
        return Deadline(idle=idle, busy=self._most_seconds if stage == "test" else _MOST)


class Watch:
    """Watches one round: a start, a case, or a phase of a test.

    Any new record counts as progress. A worker sends a record when it reaches another stage, and from time to time as
    tensors are read.
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
        """Returns the order to stop the workers once a deadline has passed; None before that.

        records: the last record of each rank.
        in_trouble: a function that returns whether some rank can keep the others from finishing.
        idle_seconds: a function that returns for how long all unfinished workers have been idle.
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
            return StopWorker(why="others", detail="still running when another rank was in trouble")
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
        """Returns whether the other ranks have had enough time.

        seconds: the time since the trouble began.
        """
        if self._grace is not None:
            return seconds > self._grace
        if seconds > _GRACE:
            return True
        if seconds <= _IDLE_GRACE or seconds - self._asked_in_trouble_at < _IDLE_POLL:
            return False
        self._asked_in_trouble_at = seconds
        return idle_seconds() >= _IDLE_GRACE

    def _find_passed_deadline(self, idle_seconds: Callable[[], float]) -> float | None:
        """Returns the deadline in seconds once it has passed; None before that."""
        deadline = self._deadlines.choose(self._stage)
        if self._still > deadline.busy:
            return deadline.busy
        if deadline.idle is None or self._still <= deadline.idle or self._still - self._asked_at < _IDLE_POLL:
            return None
        self._asked_at = self._still
        return round(deadline.idle) if idle_seconds() >= deadline.idle else None
