"""How long a round may stand still: a fixed time, or one that follows what this run has taken so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.probe.job import Limits
from fsdp_doctor.verdict.records import Stage

# Before the first record of a case, or of a worker that is starting, there is no stage yet.
RoundStage: TypeAlias = Stage | Literal["start"]
# What takes long because the model is large, and not because something is stuck.
_GROWING_STAGES: tuple[RoundStage, ...] = ("start", "checkpoint", "build", "reference", "fingerprint", "verify")
_LEAST, _MOST = 5.0, 30.0
_TIMES_THE_LONGEST = 4.0


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """Seconds without progress.

    idle: after which a round hangs where the workers of all ranks do nothing; None where that counts for nothing.
    busy: after which it hangs whatever they do.
    """

    idle: float | None
    busy: float


class Deadlines:
    """The deadlines of one run. They grow with the slowest that the run has shown itself to be."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._longest = 0.0

    def saw(self, seconds: float) -> None:
        """Some stage of a case made progress after that time."""
        self._longest = max(self._longest, seconds)

    def of(self, stage: RoundStage) -> Deadline:
        if stage in _GROWING_STAGES:
            return Deadline(idle=None, busy=self._limits.start)
        if self._limits.stage is not None:
            return Deadline(idle=None, busy=self._limits.stage)
        idle = min(max(_LEAST, _TIMES_THE_LONGEST * self._longest), _MOST)
        # What a test does is its own affair, as long as it does anything.
        return Deadline(idle=idle, busy=self._limits.start if stage == "test" else _MOST)
