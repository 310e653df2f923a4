"""Processes as the kernel sees them: what tells a hang from a slow machine, and what must not outlive a worker."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Collection
from dataclasses import dataclass

import psutil

_PR_SET_CHILD_SUBREAPER = 36
# Threads of NCCL, gloo and CUDA that wake to look at something take up to 2 % while a worker hangs.
_IDLE_SHARE = 0.1
# They sleep again by themselves. One that works on a busy machine loses the processor, a hundred times
# in half a second.
_INTERRUPTIONS = 5
# Whoever looks every half second and comes as late as this is on a machine that stands still itself.
_STALLED_SECONDS = 2.0


def adopt_orphans() -> None:
    """Makes this process, instead of init, the parent of each descendant whose parent ends from now on."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans(workers: Collection[int]) -> None:
    """Kills the children that are neither ``workers`` nor in this process's session, and the orphans that these
    leave.
    """
    while orphans := [child for child in psutil.Process().children() if _is_orphan(child.pid, workers)]:
        for orphan in orphans:
            with contextlib.suppress(psutil.Error):
                orphan.kill()
                orphan.wait()


def _is_orphan(pid: int, workers: Collection[int]) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return pid not in workers and os.getsid(pid) != os.getsid(0)
    return False


@dataclass(frozen=True, kw_only=True)
class _Thread:
    """waits, interruptions: how often it gave up the processor, and lost it."""

    state: str
    waits: int
    interruptions: int

    def was_active_since(self, before: _Thread) -> bool:
        """Returns whether the process is kept from its work by the disk, or by others that want the processor too."""
        running = psutil.STATUS_RUNNING
        ready_all_the_time = (self.state, before.state) == (running, running) and self.waits == before.waits
        interrupted = self.interruptions - before.interruptions >= _INTERRUPTIONS
        return self.state == psutil.STATUS_DISK_SLEEP or ready_all_the_time or interrupted


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """processor_seconds: of all processes of the session so far. threads: by their ids."""

    time: float
    processor_seconds: float
    threads: dict[int, _Thread]

    def was_active_since(self, before: _Sample) -> bool:
        seconds = self.time - before.time
        taken = self.processor_seconds - before.processor_seconds
        # Less than before: a process has ended, so something was going on.
        if taken < 0 or taken > _IDLE_SHARE * seconds or seconds > _STALLED_SECONDS:
            return True
        return any(
            thread.was_active_since(before.threads[number])
            for number, thread in self.threads.items()
            if number in before.threads
        )


class Activity:
    """Watches a session of processes: the worker, its threads, and those that it started.

    It is active when it runs, when it could run and the machine has no processor for it, and when it
    waits for a disk; and idle while it waits for another process, for a device or for a lock.
    """

    def __init__(self, session: int) -> None:
        self._session = session
        self._last = self._take_sample()
        self._idle_since = self._last.time

    def measure_idle_seconds(self) -> float:
        """Returns for how many seconds the session has been idle, as far as the calls of this function can tell."""
        before, self._last = self._last, self._take_sample()
        if self._last.was_active_since(before):
            self._idle_since = self._last.time
        return self._last.time - self._idle_since

    def _take_sample(self) -> _Sample:
        processor_seconds = 0.0
        threads: dict[int, _Thread] = {}
        for pid in psutil.pids():
            # Processes and threads may end meanwhile.
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(pid) != self._session:
                    continue
                process = psutil.Process(pid)
                times = process.cpu_times()
                processor_seconds += times.user + times.system
                for number in [thread.id for thread in process.threads()]:
                    thread = psutil.Process(number)
                    switches = thread.num_ctx_switches()
                    threads[number] = _Thread(
                        state=thread.status(), waits=switches.voluntary, interruptions=switches.involuntary
                    )
        return _Sample(time=time.monotonic(), processor_seconds=processor_seconds, threads=threads)
