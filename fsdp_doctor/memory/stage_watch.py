"""Watches the stages of a job on one rank, and writes the ledger of each."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_doctor.ledgers.stage_ledger import Bytes, JobStage, MemoryClass, StageLedger
from fsdp_doctor.memory.census import owned_tensors
from fsdp_doctor.memory.counters import DeviceCounters
from fsdp_doctor.memory.host_census import host_ledger
from fsdp_doctor.memory.tracker import StorageTracker

_TRAINS: tuple[JobStage, ...] = ("first step", "trained", "trained again")


class Unwatched:
    """The stages of a job whose memory nobody asks for."""

    def of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """From now on, whose memory is told apart: at once, and within the stage that is under way."""

    def stage(self, stage: JobStage, path: str = "") -> contextlib.AbstractContextManager[None]:
        """What runs in it is the stage; its ledger is written when it ends well. Every rank must enter it alike."""
        return contextlib.nullcontext()

    def yielding(self, result: Any) -> Any:
        """What a path returned, with what it yields told apart: a mapping, or an iterator of pairs."""
        return result

    def take(self) -> tuple[StageLedger, ...]:
        """The ledgers that were written since this was last called."""
        return ()


class StageWatch(Unwatched):
    """The stages of one job, one after the other, on this rank's device. Raises CannotRun where it counts nothing."""

    def __init__(self, job: str, rank: int, device: torch.device) -> None:
        self._job = job
        self._rank = rank
        self._counters = DeviceCounters(device)
        self._tracker = StorageTracker(device)
        self._owned: Callable[[], Iterator[tuple[MemoryClass, torch.Tensor]]] = lambda: iter(())
        self._ledgers: list[StageLedger] = []

    def of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._owned = lambda: owned_tensors(model, optimizer)

        def own(*_: object) -> None:
            self._tracker.own(self._owned())

        # Between a backward and the next one's beginning nobody but the optimizer's step sees the gradients.
        optimizer.register_step_pre_hook(own)
        optimizer.register_step_post_hook(own)
        own()

    @contextlib.contextmanager
    def stage(self, stage: JobStage, path: str = "") -> Iterator[None]:
        gc.collect()
        self._counters.synchronize()
        self._tracker.own(self._owned())
        self._counters.reset_peak()
        with self._tracker.tracking("activations" if stage in _TRAINS else "communication buffers"):
            yield
            self._counters.synchronize()
        self._ledgers.append(self._ledger(stage, path))

    def yielding(self, result: Any) -> Any:
        if not isinstance(result, Mapping):
            return self._each(result)
        for value in result.values():
            self._tell_yielded(value)
        return result

    def take(self) -> tuple[StageLedger, ...]:
        taken, self._ledgers = tuple(self._ledgers), []
        return taken

    def _each(self, pairs: Any) -> Iterator[Any]:
        for pair in pairs:
            self._tell_yielded(pair[1])
            yield pair
            del pair

    def _tell_yielded(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tracker.yielded(value)

    def _ledger(self, stage: JobStage, path: str) -> StageLedger:
        counted = self._counters.read()
        owned = list(self._owned())
        self._tracker.own(owned)
        workspaces = self._counters.give_back_workspaces()
        device = counted.ledger(
            held=_with(workspaces, self._tracker.held()), at_peak=_with(workspaces, self._tracker.at_peak())
        )
        host = host_ledger(owned, self._counters.pinned_reserved())
        return StageLedger(job=self._job, stage=stage, path=path, rank=self._rank, device=device, host=host)


def _with(workspaces: int, held: Bytes) -> Bytes:
    return {**held, "activations": held.get("activations", 0) + workspaces} if workspaces else held
