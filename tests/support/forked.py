"""Forks ranks from a process that has imported torch, so that a job of several ranks starts in a fraction of a second.

The process is multiprocessing's fork server, one for the whole test session. This process serves the store of each job,
as torchrun's agent does, so that a rank finds the same environment as under torchrun.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing.forkserver
import os
import pathlib
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import psutil
import pytest
import torch.distributed as dist

from support.emulation import needs_emulation
from support.places import ROOT, TESTS

_SECONDS_OF_A_SCRIPT = 180
# The default matrix takes minutes, and longer on a busy machine.
_SECONDS_OF_A_PROBE = 1800
# The time for the other ranks and their processes to end, once rank 0 has ended.
_SECONDS_AFTER = 10


@dataclasses.dataclass(frozen=True)
class Job:
    """Ranks that were started together, and the directory with the files that they print into."""

    ranks: list[BaseProcess]
    directory: pathlib.Path

    def printed(self) -> str:
        return self.stream("stdout") + self.stream("stderr")

    def stream(self, name: Literal["stdout", "stderr"]) -> str:
        """Returns the text that the ranks wrote to the stream, one rank after the other."""
        files = (_file(self.directory, name, rank) for rank in range(len(self.ranks)))
        # A rank that has just been started may not have a file yet.
        return "".join(file.read_text(errors="replace") for file in files if file.exists())


@contextlib.contextmanager
def job(target: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Job]:
    """Context in which one rank for each tuple calls ``target`` with the tuple. At its end, kills the ranks."""
    # The store listens only on the loopback interface.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as directory:
        started = Job([], pathlib.Path(directory))
        for rank, of_rank in enumerate(arguments):
            place = _place(rank, len(arguments), store.port)
            files = [_file(started.directory, name, rank) for name in ("stdout", "stderr")]
            # The process is not a daemon, because daemons may have no children.
            started.ranks.append(fork_server().Process(target=_rank, args=(place, files, target, of_rank)))
            started.ranks[-1].start()
        try:
            yield started
        finally:
            for process in started.ranks:
                process.kill()
                process.join()
    del store


@dataclasses.dataclass(frozen=True)
class ScriptRun:
    """The result of a script. ``codes``: the ranks' exit codes; None for a rank that did not end in time."""

    codes: list[int | None]
    output: str


def run_script(
    script: pathlib.Path, device: str = "emulated", ranks: int = 2, arguments: Sequence[str] = ()
) -> ScriptRun:
    """Runs a standalone script on every rank, as torchrun does."""
    if device == "emulated":
        needs_emulation()
    with job(_run_as_main, [([str(script), *arguments], device)] * ranks) as started:
        for process in started.ranks:
            process.join(_SECONDS_OF_A_SCRIPT)
        return ScriptRun([process.exitcode for process in started.ranks], started.printed())


@dataclasses.dataclass(frozen=True)
class DoctorRun:
    """The result of a run.

    ``code``: the exit code of rank 0. ``left``: processes of the run that were still alive after it.
    """

    code: int
    stdout: str
    stderr: str
    left: list[str]


def run_doctor(
    arguments: Sequence[str], ranks: int, env: dict[str, str], script: pathlib.Path | None = None
) -> DoctorRun:
    """Runs ``fsdp-doctor ARGUMENTS``, or a script with these arguments, on every rank, as torchrun does."""
    # The write end stays open in the ranks and in the processes that they fork.
    alive, write_end = multiprocessing.Pipe(duplex=False)
    pipe = os.readlink(f"/proc/self/fd/{write_end.fileno()}")
    with job(_run_the_doctor, [(list(arguments), env, script, write_end)] * ranks) as started:
        write_end.close()
        first, *others = started.ranks
        first.join(_SECONDS_OF_A_PROBE)
        assert first.exitcode is not None, f"no end within {_SECONDS_OF_A_PROBE} seconds: {started.printed()}"
        for process in others:
            if first.exitcode:
                # torchrun does the same once a rank has failed.
                process.terminate()
            process.join(_SECONDS_AFTER)
        printed = started.stream("stdout"), started.stream("stderr")
    with alive, contextlib.suppress(EOFError):
        if not alive.poll(_SECONDS_AFTER):
            return DoctorRun(first.exitcode, *printed, _end_all_with(pipe))
        alive.recv()
    return DoctorRun(first.exitcode, *printed, left=[])


def _end_all_with(pipe: str) -> list[str]:
    """Kills the processes that have the pipe open, and returns their command lines."""
    left = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(OSError):
            files = pathlib.Path(f"/proc/{process.pid}/fd").iterdir()
            if process.pid != os.getpid() and pipe in [os.readlink(file) for file in files]:
                left.append(" ".join(process.info["cmdline"]))
                process.kill()
    return left


@functools.cache
def fork_server() -> ForkServerContext:
    """Returns the process from which ranks are forked. The first call must not come from a thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.imported_once"])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{TESTS}")
        environment.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.forkserver.ensure_running()
    return context


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    size, address = str(ranks), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return of_rank | address | {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def _file(directory: pathlib.Path, stream: str, rank: int) -> pathlib.Path:
    return directory / f"{stream}.{rank}"


def _rank(
    place: dict[str, str],
    files: Sequence[pathlib.Path],
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    for name in ("COLUMNS", "LINES"):
        # readline, which pytest imports, has set this variable without os.environ.
        os.environ.pop(name, None)
    os.environ |= place
    target(*arguments)


def _run_as_main(command: list[str], device: str) -> None:
    if device == "emulated":
        import fsdp_doctor.emulated  # noqa: F401, which registers the device
    sys.argv = command
    sys.path.insert(0, os.path.dirname(command[0]))
    runpy.run_path(command[0], run_name="__main__")


def _run_the_doctor(arguments: list[str], env: dict[str, str], script: pathlib.Path | None, write_end: Any) -> None:
    os.environ |= env
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    if script is None:
        sys.argv = ["fsdp-doctor", *arguments]
        runpy.run_module("fsdp_doctor", run_name="__main__")
    else:
        _run_as_main([str(script), *arguments], "cpu")
