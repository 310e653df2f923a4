"""Whether a worker does anything, as the kernel sees it: what tells a hang from a slow machine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

# Threads of NCCL, gloo and CUDA that wake to look at something take up to 2 % while a worker hangs.
_IDLE_SHARE = 0.1
# They sleep again by themselves. One that works on a busy machine loses the processor, a hundred times
# in half a second.
_INTERRUPTIONS = 5
# Whoever looks every half second and comes as late as this is on a machine that stands still itself.
_STALLED_SECONDS = 2.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat, counted from the one after the name: see proc_pid_stat(5).
_SESSION, _USER_TICKS, _SYSTEM_TICKS = 3, 11, 12


@dataclass(frozen=True, kw_only=True)
class _Thread:
    """state: the kernel's letter. waits, interruptions: how often it gave up the processor, and lost it."""

    state: str
    waits: int
    interruptions: int

    def active_since(self, before: _Thread) -> bool:
        """Whether it is kept from its work by the disk, or by others that want the processor too."""
        ready_all_the_time = (self.state, before.state) == ("R", "R") and self.waits == before.waits
        interrupted = self.interruptions - before.interruptions >= _INTERRUPTIONS
        return self.state == "D" or ready_all_the_time or interrupted


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """processor_seconds: of all processes of the session so far. threads: by the path of their directory."""

    time: float
    processor_seconds: float
    threads: dict[str, _Thread]

    def active_since(self, before: _Sample) -> bool:
        seconds = self.time - before.time
        taken = self.processor_seconds - before.processor_seconds
        # Less than before: a process has ended, so something was going on.
        if taken < 0 or taken > _IDLE_SHARE * seconds or seconds > _STALLED_SECONDS:
            return True
        return any(
            thread.active_since(before.threads[name]) for name, thread in self.threads.items() if name in before.threads
        )


class Activity:
    """Watches a session of processes: the worker, its threads, and what it started.

    It is active when it runs, when it could run and the machine has no processor for it, and when it
    waits for a disk; and idle while it waits for another process, for a device or for a lock.
    """

    def __init__(self, session: int) -> None:
        self._session = session
        self._last = self._sample()
        self._idle_since = self._last.time

    def idle_seconds(self) -> float:
        """For how long the session has been idle, as far as the calls of this function can tell."""
        before, self._last = self._last, self._sample()
        if self._last.active_since(before):
            self._idle_since = self._last.time
        return self._last.time - self._idle_since

    def _sample(self) -> _Sample:
        processor_seconds = 0.0
        threads: dict[str, _Thread] = {}
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            stat = _read(process / "stat").rpartition(")")[2].split()
            if stat and int(stat[_SESSION]) == self._session:
                processor_seconds += (int(stat[_USER_TICKS]) + int(stat[_SYSTEM_TICKS])) / _TICKS_PER_SECOND
                threads.update(_threads(process))
        return _Sample(time=time.monotonic(), processor_seconds=processor_seconds, threads=threads)


def _threads(process: pathlib.Path) -> Iterator[tuple[str, _Thread]]:
    for directory in process.glob("task/*"):
        lines = _read(directory / "status").splitlines()
        status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        yield (
            str(directory),
            _Thread(
                state=status.get("State", "")[:1],
                waits=int(status.get("voluntary_ctxt_switches", 0)),
                interruptions=int(status.get("nonvoluntary_ctxt_switches", 0)),
            ),
        )


def _read(file: pathlib.Path) -> str:
    """Empty for a process or thread that is gone."""
    with contextlib.suppress(OSError):
        return file.read_text()
    return ""
