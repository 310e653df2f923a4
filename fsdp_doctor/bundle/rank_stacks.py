"""The Python stack of every rank of a command that hangs, which the ranks write themselves.

Python's faulthandler, which ``PYTHONFAULTHANDLER`` switches on, writes the stacks of all threads when SIGABRT comes,
and the process ends. So it is asked for last, when the command is to be ended anyway. All processes are stopped first:
otherwise the first one to end would make torchrun end the others, or wake those that wait for it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_doctor.bundle import processes
from fsdp_doctor.bundle.processes import RankProcess
from fsdp_doctor.report.layout import main_thread

_SECONDS = 5.0
# Frames of torch, of other packages and of Python itself.
_OTHERS = re.compile(r"/torch/|-packages/|/lib/python|<frozen ")
_BEGINS = ("Fatal Python error", "Current thread", "Thread 0x")
NO_STACK = "no stack: it is no Python process, or handles SIGABRT itself"


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """What one rank was doing. name: of the rank. stack: as faulthandler wrote it, or why there is none."""

    name: str
    stack: str

    @property
    def place(self) -> str:
        """The innermost frame of the user's own code, or of no torch; else the innermost one."""
        frames = [line.strip() for line in main_thread(self.stack) if line.lstrip().startswith("File ")]
        own = [frame for frame in frames if not _OTHERS.search(frame)]
        return (own or frames or [NO_STACK])[0]


def take(root: int, output: Callable[[float], bytes]) -> list[RankStack]:
    """The stacks of the ranks below the process ``root``, each of which ends of it.

    output: waits up to so many seconds, and returns what the command has written meanwhile.
    """
    pids = processes.descendants(root)
    ranks = processes.ranks(pids)
    _send(pids, signal.SIGSTOP)
    output(0.2)
    return [_stack(rank, output) for rank in ranks]


def end(root: int) -> None:
    """Ends every process below ``root``."""
    for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        pids = processes.descendants(root)
        _send(pids, number)
        _send(pids, signal.SIGCONT)
        for pid in pids:
            processes.wait_for_end(pid, patience)


def _stack(rank: RankProcess, output: Callable[[float], bytes]) -> RankStack:
    own_file = processes.standard_error_file(rank.pid)
    begin = own_file.stat().st_size if own_file is not None else 0
    # A stack is wanted, not gigabytes of memory.
    with contextlib.suppress(OSError, ValueError):
        resource.prlimit(rank.pid, resource.RLIMIT_CORE, (0, resource.prlimit(rank.pid, resource.RLIMIT_CORE)[1]))
    _send([rank.pid], signal.SIGABRT)
    _send([rank.pid], signal.SIGCONT)
    written = b""
    left = _SECONDS
    while left > 0 and not processes.wait_for_end(rank.pid, 0.05):
        written += output(0.05)
        left -= 0.1
    written += output(0.05)
    if own_file is not None:
        written += _tail(own_file, begin)
    return RankStack(name=rank.name, stack=_faulthandlers_part(written.decode(errors="replace")))


def _faulthandlers_part(text: str) -> str:
    begins = [at for word in _BEGINS if (at := text.find(word)) >= 0]
    return text[min(begins) :].split("\nExtension modules:")[0].strip() if begins else NO_STACK


def _tail(path: pathlib.Path, begin: int) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(begin)
        return file.read(1 << 20)
    return b""


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
