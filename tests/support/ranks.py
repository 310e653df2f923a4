"""Tests that several ranks run together.

A function that is decorated with ``on_ranks`` is called on every rank, inside a process group, and becomes a test for
each setting. The ranks of a setting are started once for a file, and run its functions one after the other. If a rank
raises, ends or hangs, the test fails, and the next test gets new ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import importlib.util
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from support import forked
from support.emulation import needs_emulation

Check = Callable[[], None]

SECONDS_OF_A_CHECK = 240
# The timeout of a collective, for the case that not all ranks call it.
SECONDS_OF_A_COLLECTIVE = 30
# Seconds for the other ranks to end, once one is in trouble.
_GRACE = 5


@dataclasses.dataclass(frozen=True)
class Setting:
    device: Literal["cpu", "emulated"]
    ranks: int

    def __str__(self) -> str:
        return f"{self.device}-{self.ranks}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a check on one rank."""

    kind: Literal["passed", "failed", "skipped"]
    text: str = ""


# In the process of pytest


def on_ranks(*settings: Setting, last_of_its_ranks: bool = False, seconds: int | None = None) -> Callable[[Check], Any]:
    """Turns a check into a test, which the ranks of each setting run within ``seconds`` at most.

    ``last_of_its_ranks``: whether the check leaves its ranks in a state in which they cannot run another check.
    """

    def decorate(check: Check) -> Any:
        @pytest.mark.parametrize("setting", settings, ids=str)
        def test(setting: Setting, groups: Groups) -> None:
            groups.run(setting, check, last=last_of_its_ranks, seconds=seconds)

        # functools.wraps is not used, because pytest would then read the check's own parameters.
        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        test.on_rank = check  # type: ignore[attr-defined]
        return test

    return decorate


class Groups:
    """The groups of ranks that are running, one for each setting."""

    def __init__(self, seconds_of_a_check: int = SECONDS_OF_A_CHECK) -> None:
        self._seconds = seconds_of_a_check
        self._running: dict[Setting, _Group] = {}

    def run(self, setting: Setting, check: Check, *, last: bool = False, seconds: int | None = None) -> None:
        if setting not in self._running:
            self._running[setting] = _Group(setting)
        outcomes = self._running[setting].run(check, seconds or self._seconds)
        failed = [f"rank {rank}: {outcome.text}" for rank, outcome in enumerate(outcomes) if outcome.kind == "failed"]
        if failed or last:
            printed = self._end(setting)
        if failed:
            pytest.fail("\n".join([*failed, "What the ranks printed:", printed[-4000:]]), pytrace=False)
        if skipped := [outcome.text for outcome in outcomes if outcome.kind == "skipped"]:
            pytest.skip(skipped[0])

    def end(self) -> None:
        for setting in tuple(self._running):
            self._end(setting)

    def _end(self, setting: Setting) -> str:
        return self._running.pop(setting).end()


class _Group:
    """Ranks that wait for a check, run it, and report its outcome."""

    def __init__(self, setting: Setting) -> None:
        if setting.device == "emulated":
            needs_emulation()
        pipes = [multiprocessing.Pipe() for _ in range(setting.ranks)]
        self._ours = [ours for ours, _ in pipes]
        self._stack = contextlib.ExitStack()
        arguments = [(setting.device, theirs) for _, theirs in pipes]
        self._job = self._stack.enter_context(forked.job(_serve, arguments))

    def end(self) -> str:
        """Ends the ranks, and returns the text that they printed."""
        printed = self._job.printed()
        self._stack.close()
        return printed

    def run(self, check: Check, seconds: int) -> Sequence[Outcome]:
        for rank in self._ours:
            with contextlib.suppress(BrokenPipeError):
                rank.send((check.__code__.co_filename, check.__name__, seconds))
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + seconds + _GRACE
        while len(outcomes) < len(self._ours):
            waiting = [rank for rank in range(len(self._ours)) if rank not in outcomes]
            sources = [source for rank in waiting for source in (self._ours[rank], self._job.ranks[rank].sentinel)]
            if not connection.wait(sources, max(0.0, end - time.monotonic())):
                break
            outcomes |= {rank: outcome for rank in waiting if (outcome := self._outcome(rank)) is not None}
            if any(outcome.kind == "failed" for outcome in outcomes.values()):
                end = min(end, time.monotonic() + _GRACE)
        stuck = Outcome("failed", "came to no end")
        return [outcomes.get(rank, stuck) for rank in range(len(self._ours))]

    def _outcome(self, rank: int) -> Outcome | None:
        """Returns the outcome on a rank; None while the rank is still running the check."""
        process = self._job.ranks[rank]
        try:
            if self._ours[rank].poll():
                return self._ours[rank].recv()
        except EOFError:
            process.join(_GRACE)
        return None if process.is_alive() else Outcome("failed", f"ended with exit code {process.exitcode}")


# In a rank


def this_rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def device_type() -> str:
    """Returns ``cpu`` or ``emulated``."""
    return os.environ["FSDP_DOCTOR_TEST_DEVICE"]


def this_device() -> torch.device:
    return torch.device("cpu") if device_type() == "cpu" else torch.device(device_type(), this_rank())


def accelerator() -> Any:
    """Returns the device's module, such as ``torch.cpu``."""
    return torch.get_device_module(device_type())


@functools.cache
def control() -> dist.ProcessGroup:
    """Returns a process group that only the tests use, to keep the ranks together."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=SECONDS_OF_A_CHECK))


def together() -> None:
    dist.barrier(control())


def of_all_ranks(value: Any) -> list[Any]:
    """Returns the values of all ranks. All ranks must call this function."""
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, value, control())
    return everyone


def _serve(device: str, commands: Connection) -> None:
    os.environ["FSDP_DOCTOR_TEST_DEVICE"] = device
    backend = "gloo"
    if device == "emulated":
        import fsdp_doctor.emulated  # noqa: F401, which registers the device

        backend = "cpu:gloo,emulated:emulated"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=SECONDS_OF_A_COLLECTIVE))
    if device == "emulated":
        accelerator().set_device(this_rank())
    with contextlib.suppress(EOFError):
        while True:
            commands.send(_run(*commands.recv()))
    # The interpreter's normal exit would wait for process groups that are stuck.
    os._exit(0)


def _run(file: str, name: str, seconds: int) -> Outcome:
    # Prints the stacks of all threads and ends the process.
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        getattr(_module(file), name).on_rank()
    except pytest.skip.Exception as skipped:
        return Outcome("skipped", str(skipped))
    except (Exception, pytest.fail.Exception):
        return Outcome("failed", traceback.format_exc())
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Outcome("passed")


@functools.cache
def _module(file: str) -> ModuleType:
    name = os.path.basename(file).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
