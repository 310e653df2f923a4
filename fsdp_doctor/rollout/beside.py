"""Starts an engine beside a trainer's worker, each in a process of its own, and gathers what they hold."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import tempfile
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

from fsdp_doctor.errors import CannotRun
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.memory.counters import check_counted
from fsdp_doctor.plan.meta_model import on_meta
from fsdp_doctor.rollout import stand_ins
from fsdp_doctor.rollout.rollout_request import Attempt, Beside, RolloutRequest

_SECONDS_TO_END = 20


def attempts(request: RolloutRequest) -> list[Attempt]:
    """The engine's start beside a worker that has loaded the model, and beside one that has not.

    Raises CannotRun where the devices are too few, where nobody counts their memory, and where a process ends before
    it says what it holds; UsageError for a model that there is not.
    """
    on_meta(request.model, request.layers)
    devices.load(RunDevice(type=request.device), request.device)
    check_counted(request.device)
    devices.check_there_is_one(request.device, rank=request.ranks - 1, local_rank=request.ranks - 1)
    context = _fork_server()
    return [_attempt(context, request, "loaded"), _attempt(context, request, "not loaded")]


def _attempt(context: ForkServerContext, request: RolloutRequest, beside: Beside) -> Attempt:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as running:
        scratch = pathlib.Path(directory)
        ranks = [
            running.enter_context(
                RunningProcess(
                    context, f"rank {rank} of the trainer", stand_ins.trainer, request, beside, rank, scratch
                )
            )
            for rank in range(request.ranks)
        ]
        ledgers = [rank.said() for rank in ranks]
        for ledger in ledgers:
            if isinstance(ledger, str):
                raise CannotRun(f"the trainer's worker cannot load the model: {ledger}")
        starting = running.enter_context(
            RunningProcess(context, "the engine", stand_ins.engine, request, beside, scratch)
        )
        start, engine = starting.said()
        return Attempt(beside=beside, trainer=ledgers[0], engine=engine, start=start)


class RunningProcess:
    """One process, from its start until its end, which comes with that of the block."""

    def __init__(self, context: ForkServerContext | SpawnContext, name: str, function: Any, *arguments: Any) -> None:
        self._name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> RunningProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(_SECONDS_TO_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def said(self) -> Any:
        """Raises CannotRun where it ends first."""
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join(_SECONDS_TO_END)
            raise CannotRun(
                f"{self._name} ended with exit code {self._process.exitcode} before it said what it holds"
            ) from None


def _fork_server() -> ForkServerContext:
    """It imports torch once for all processes, and makes no CUDA context."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([stand_ins.__name__])
    return context
