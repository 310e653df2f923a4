"""Processes that a worker started in sessions of their own: they outlive it, become its supervisor's, and are ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
from collections.abc import Collection

_PR_SET_CHILD_SUBREAPER = 36
# Fields of /proc/PID/stat, counted from the one after the name: see proc_pid_stat(5).
_PARENT, _SESSION = 1, 3


def adopt() -> None:
    """From now on a process whose parent ends becomes this process's child, and not init's."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_adopted(workers: Collection[int]) -> None:
    """Kills the children that are neither ``workers`` nor of this process's session, and what they leave in turn."""
    while found := [pid for pid in _children_of_other_sessions() if pid not in workers]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children_of_other_sessions() -> list[int]:
    own, session = os.getpid(), os.getsid(0)
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            stat = (process / "stat").read_text().rpartition(")")[2].split()
            if int(stat[_PARENT]) == own and int(stat[_SESSION]) != session:
                found.append(int(process.name))
    return found
