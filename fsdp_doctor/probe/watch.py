"""When workers stand still, and why they are to be stopped then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fsdp_doctor.probe.deadlines import Deadlines, RoundStage
from fsdp_doctor.probe.instructions import StopWorker
from fsdp_doctor.verdict.records import Record

_IDLE_POLL = 0.25
# What the other ranks have to end by themselves once one is in trouble, and what is enough where they do nothing.
_GRACE, _IDLE_GRACE = 5.0, 2.0
# A look that comes later than this after the last one was held up by the machine, not by a worker.
_LATE_SECONDS = 1.0


class Watch:
    """Over one round: a start, a case, or a phase of a test.

    Progress is any new record among those that are looked at: another stage, or another tensor now and then.
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
        """The order to stop the workers, once it is time for it.

        records: the last ones. in_trouble: whether some rank can keep the others from finishing. idle_seconds: for how
        long no worker has done anything, of those that are not through.
        """
        now = time.monotonic()
        self._still += min(now - self._looked_at, _LATE_SECONDS)
        self._looked_at = now
        self._look_for_progress(records)
        if self._trouble_at is None and in_trouble():
            self._trouble_at = now
        if self._trouble_at is not None and self._grace_is_over(now - self._trouble_at, idle_seconds):
            return StopWorker(why="others", detail="still at it when another rank was in trouble")
        hung_for = self._hung_for(idle_seconds)
        if hung_for is None:
            return None
        return StopWorker(why="deadline", detail=f"no progress in stage {self._stage} for {hung_for:g} s")

    @property
    def _stage(self) -> RoundStage:
        said = [record for record in self._records if record is not None]
        going_on = [record for record in said if not record.done]
        return (going_on or said)[0].stage if said else "start"

    def _look_for_progress(self, records: Sequence[Record | None]) -> None:
        if all(new is old for new, old in zip(records, self._records, strict=True)):
            return
        if any(record is not None for record in self._records):
            self._deadlines.saw(self._still)
        self._records, self._still, self._asked_at = records, 0.0, 0.0

    def _grace_is_over(self, seconds: float, idle_seconds: Callable[[], float]) -> bool:
        """seconds: since the trouble."""
        if self._grace is not None:
            return seconds > self._grace
        if seconds > _GRACE:
            return True
        if seconds <= _IDLE_GRACE or seconds - self._asked_in_trouble_at < _IDLE_POLL:
            return False
        self._asked_in_trouble_at = seconds
        return idle_seconds() >= _IDLE_GRACE

    def _hung_for(self, idle_seconds: Callable[[], float]) -> float | None:
        """The deadline in seconds, once it has passed."""
        deadline = self._deadlines.of(self._stage)
        if self._still > deadline.busy:
            return deadline.busy
        if deadline.idle is None or self._still <= deadline.idle or self._still - self._asked_at < _IDLE_POLL:
            return None
        self._asked_at = self._still
        return round(deadline.idle) if idle_seconds() >= deadline.idle else None
