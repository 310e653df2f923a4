"""Reads the state of processes from the kernel, and ends processes that must not outlive a worker.

The state distinguishes a hang from a slow machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Collection
from dataclasses import dataclass

import psutil

_PR_SET_CHILD_SUBREAPER = 36
# Polling threads of NCCL, gloo and CUDA use up to 2 % of a processor while a worker hangs.
_IDLE_SHARE = 0.1
# Polling threads give up the processor by themselves. A thread that works on a busy machine is preempted instead, a
# hundred times in half a second.
_INTERRUPTIONS = 5
# Samples are taken every half second. If one comes later than this, the machine itself was stalled.
_STALLED_SECONDS = 2.0


def adopt_orphans() -> None:
    """Makes this process, instead of init, the new parent of each descendant whose parent ends from now on."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans(workers: Collection[int]) -> None:
    """Kills the children outside ``workers`` and outside this process's session, and the orphans of killed children."""
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
    """The state of a thread.

    waits: the number of times that the thread gave up the processor.
    interruptions: the number of times that the thread was preempted.
    """

    state: str
    waits: int
    interruptions: int

    def was_active_since(self, before: _Thread) -> bool:
        """Returns whether the thread waited for the disk, or ran or was ready to run, since ``before``."""
        running = psutil.STATUS_RUNNING
        ready_all_the_time = (self.state, before.state) == (running, running) and self.waits == before.waits
        interrupted = self.interruptions - before.interruptions >= _INTERRUPTIONS
        return self.state == psutil.STATUS_DISK_SLEEP or ready_all_the_time or interrupted


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """Sample of a session of processes at one time.

    processor_seconds: the processor time that all processes of the session have used so far.
    threads: the state of each thread, by the thread's id.
    """

    time: float
    processor_seconds: float
    threads: dict[int, _Thread]

    def was_active_since(self, before: _Sample) -> bool:
        seconds = self.time - before.time
        taken = self.processor_seconds - before.processor_seconds
        # A sum that is smaller than before means that a process has ended, so the session was active.
        if taken < 0 or taken > _IDLE_SHARE * seconds or seconds > _STALLED_SECONDS:
            return True
        return any(
            thread.was_active_since(before.threads[number])
            for number, thread in self.threads.items()
            if number in before.threads
        )


class Activity:
    """Watches a session of processes: the worker, its threads, and the processes that it started.

    The session is active when it runs, when it is ready to run but the machine has no free processor, and when it waits
    for a disk. It is idle when it waits for another process, a device or a lock.
    """

    def __init__(self, session: int) -> None:
        self._session = session
        self._last = self._take_sample()
        self._idle_since = self._last.time

    def measure_idle_seconds(self) -> float:
        """Returns for how many seconds the session has been idle.

        Activity is sampled only when this function is called.
        """
        before, self._last = self._last, self._take_sample()
        if self._last.was_active_since(before):
            self._idle_since = self._last.time
        return self._last.time - self._idle_since

    def _take_sample(self) -> _Sample:
        processor_seconds = 0.0
        threads: dict[int, _Thread] = {}
        for pid in psutil.pids():
            # Processes and threads may end while they are read.
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
