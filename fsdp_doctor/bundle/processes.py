"""The processes of a command, as /proc shows them: all that it started, and which of them are ranks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import select
from collections.abc import Sequence
from dataclasses import dataclass

_PR_SET_CHILD_SUBREAPER = 36
_PROC = pathlib.Path("/proc")


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """The main process of one rank on this machine; ``rank`` is None for a Python process that is told none."""

    pid: int
    rank: int | None

    @property
    def name(self) -> str:
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank}"


def keep_orphans() -> None:
    """From here on, what a command leaves behind becomes this process's child, and so can be found and ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """All processes below ``root``, parents before their children; those that have ended are not among them."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop(0)
        found.append(pid)
        waiting += children.get(pid, ())
    return found


def ranks(pids: Sequence[int]) -> list[RankProcess]:
    """The first process of each rank, by the variable RANK; where none has it, every Python process."""
    first: dict[int, int] = {}
    for pid in pids:
        number = _variable(pid, "RANK")
        if number.isdecimal():
            first.setdefault(int(number), pid)
    if first:
        return [RankProcess(pid=pid, rank=rank) for rank, pid in sorted(first.items())]
    return [RankProcess(pid=pid, rank=None) for pid in pids if _is_python(pid)]


def wait_for_end(pid: int, seconds: float) -> bool:
    """Whether the process has ended, now or within that time."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def standard_error_file(pid: int) -> pathlib.Path | None:
    """The file that the process's standard error goes to, as torchrun's --redirects has it; None if to no file."""
    try:
        target = pathlib.Path(os.readlink(_PROC / str(pid) / "fd" / "2"))
    except OSError:
        return None
    return target if target.is_file() else None


def _parents() -> dict[int, int]:
    """By process, its parent; zombies are left out."""
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    found[int(entry.name)] = int(parent)
    return found


def _variable(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            key, _, value = line.decode(errors="replace").partition("=")
            if key == name:
                return value
    return ""


def _is_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "python" in pathlib.Path(os.readlink(_PROC / str(pid) / "exe")).name
    return False
