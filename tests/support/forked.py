"""Ranks forked from a process that has imported torch: a job of several ranks starts in a fraction of a second.

The process is multiprocessing's fork server, one for the whole test session. The store of each job is torchrun's
agent's, played by this process, so a rank finds all that it would find under torchrun.
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
from typing import Any

import pytest
import torch.distributed as dist
from program import ROOT, TESTS

from support.emulation import needs_emulation

_IMPORTED_ONCE = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
    "support.ranks",
]
_SECONDS_OF_A_SCRIPT = 180


@dataclasses.dataclass(frozen=True)
class Job:
    """Ranks that were started together, and the file that they print into."""

    ranks: list[BaseProcess]
    output: pathlib.Path

    def printed(self) -> str:
        return self.output.read_text(errors="replace")


@contextlib.contextmanager
def job(device: str, target: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Job]:
    """A rank for each tuple of arguments, which calls ``target`` with it; none outlives the context."""
    if device == "emulated":
        needs_emulation()
    # Listens on the loopback interface alone.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as directory:
        started = Job([], pathlib.Path(directory) / "output")
        started.output.touch()
        for rank, own in enumerate(arguments):
            place = _place(rank, len(arguments), store.port)
            start = (device, place, started.output, target, own)
            started.ranks.append(_fork_server().Process(target=_rank, args=start, daemon=True))
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
    """``codes``: the ranks' exit codes, None for one that did not end in time."""

    codes: list[int | None]
    output: str


def run_script(script: pathlib.Path, device: str = "emulated", ranks: int = 2) -> ScriptRun:
    """A standalone script on every rank, as torchrun runs it."""
    with job(device, _run_as_main, [(str(script),)] * ranks) as started:
        for process in started.ranks:
            process.join(_SECONDS_OF_A_SCRIPT)
        return ScriptRun([process.exitcode for process in started.ranks], started.printed())


@functools.cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{TESTS}")
        environment.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.forkserver.ensure_running()
    return context


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    size, address = str(ranks), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return own | address | {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def _rank(
    device: str, place: dict[str, str], output: pathlib.Path, target: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ |= place
    if device == "emulated":
        import fsdp_doctor.emulated  # noqa: F401, which registers the device
    target(*arguments)


def _run_as_main(script: str) -> None:
    runpy.run_path(script, run_name="__main__")
