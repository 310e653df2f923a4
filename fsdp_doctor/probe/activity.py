"""Whether a worker does anything, as the kernel sees it: what tells a hang from a slow machine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from dataclasses import dataclass

# Threads of NCCL and CUDA that look at something now and then take up to 2 % while a worker hangs.
_IDLE_SHARE = 0.1
# Whoever looks every half second and comes as late as this is on a machine that stands still itself.
_STALLED_SECONDS = 2.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_NANOSECONDS = 1e9
# Fields of /proc/PID/stat, counted from the one after the name: see proc_pid_stat(5).
_STATE, _SESSION, _USER_TICKS, _SYSTEM_TICKS = 0, 3, 11, 12


@dataclass(frozen=True)
class _Sample:
    """processor: seconds of processor time taken and waited for. moving: a thread runs or waits for a disk."""

    time: float
    processor: float
    moving: bool


class Activity:
    """Watches a session of processes: the worker, its threads, and what it started.

    A process counts as active when it runs, when it could run and the machine has no processor for it,
    and when it waits for a disk. It does not while it waits for another process, for a device or a lock.
    """

    def __init__(self, session: int) -> None:
        self._session = session
        self._last = self._sample()
        self._idle_since = self._last.time

    def idle_seconds(self) -> float:
        """Since when the session has done nothing, as far as the calls of this function can tell."""
        before, self._last = self._last, self._sample()
        seconds = self._last.time - before.time
        taken = self._last.processor - before.processor
        # Less than before: a process has ended, so something was going on.
        active = self._last.moving or taken < 0 or taken > _IDLE_SHARE * seconds
        if active or seconds > _STALLED_SECONDS:
            self._idle_since = self._last.time
        return self._last.time - self._idle_since

    def _sample(self) -> _Sample:
        processor, moving = 0.0, False
        for process in pathlib.Path("/proc").iterdir():
            if not process.name.isdigit():
                continue
            stat = _stat(process)
            if not stat or int(stat[_SESSION]) != self._session:
                continue
            processor += (int(stat[_USER_TICKS]) + int(stat[_SYSTEM_TICKS])) / _TICKS_PER_SECOND
            for thread in _threads(process):
                moving = moving or _stat(thread)[:1] in (["R"], ["D"])
                processor += _seconds_in_the_queue(thread)
        return _Sample(time.monotonic(), processor, moving)


def _threads(process: pathlib.Path) -> list[pathlib.Path]:
    with contextlib.suppress(OSError):
        return list((process / "task").iterdir())
    return []


def _stat(process: pathlib.Path) -> list[str]:
    """The fields after the name; none for a process or thread that is gone."""
    with contextlib.suppress(OSError):
        return (process / "stat").read_text().rpartition(")")[2].split()
    return []


def _seconds_in_the_queue(thread: pathlib.Path) -> float:
    """How long it has been ready to run without a processor; 0 where the kernel does not count it."""
    with contextlib.suppress(OSError, IndexError):
        return int((thread / "schedstat").read_text().split()[1]) / _NANOSECONDS
    return 0.0
