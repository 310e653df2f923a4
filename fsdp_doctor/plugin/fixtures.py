"""The fixtures ``this_rank`` and ``fsdp_case``, a model in a scenario of the matrix for the test's own code."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_doctor.case.case_run import CaseRun
from fsdp_doctor.case.matrix_steps import MatrixSteps
from fsdp_doctor.case.trainer import Trainer
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.plugin.frames import select_frames
from fsdp_doctor.verdict.classification import are_workers_whole, classify
from fsdp_doctor.verdict.records import RankReport

# The number of offloads of one strategy, staged and not staged.
_MOST_KEPT = 16


@dataclass(frozen=True, kw_only=True)
class ThisRank:
    """The rank that a test runs on. The default process group contains all ranks, with backends for CPU and device.

    device: the current device; ``cpu`` if the rank has no other.
    control: a gloo group of all ranks for the test's own messages.
    scratch: an existing directory for this test, the same on every rank; ``tmp_path`` differs between ranks.
    """

    # Fields that differ between ranks are not in the repr, so that a shared failure has the same text on all ranks.
    rank: int = field(repr=False)
    world_size: int
    device: torch.device = field(repr=False)
    control: dist.ProcessGroup = field(repr=False)
    scratch: pathlib.Path = field(repr=False)

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """Makes a device mesh, by default with one dimension over all ranks. Every rank must call this method."""
        return init_device_mesh(self.device.type, shape or (self.world_size,), mesh_dim_names=names)

    def barrier(self) -> None:
        """Waits until every rank has called this method. Uses gloo, and does not wait for work on a device."""
        dist.barrier(group=self.control)


class KeptScenarios:
    """The trainers of this rank that are still usable after earlier tests, for the same scenarios on every rank.

    whole: whether all ranks have ended every case in the same way, so that further cases can run in the same workers.
    """

    def __init__(self) -> None:
        self.whole = True
        self._trainers: dict[Scenario, Trainer] = {}

    def take(self, scenario: Scenario) -> Trainer | None:
        return self._trainers.pop(scenario, None)

    def keep(self, trainer: Trainer) -> None:
        """Keeps a trainer. If there are too many, the oldest trainer is dropped."""
        if len(self._trainers) == _MOST_KEPT:
            del self._trainers[next(iter(self._trainers))]
        self._trainers[trainer.scenario] = trainer


class FsdpCase:
    """A sharded model and its optimizer in the state of a scenario, for example trained and offloaded.

    The case is the same on every rank. Every rank must call :meth:`check`.
    """

    def __init__(
        self,
        run: CaseRun[Trainer],
        steps: MatrixSteps,
        scenario: Scenario,
        scenarios: KeptScenarios,
        this_rank: ThisRank,
    ) -> None:
        self._run = run
        self._steps = steps
        self._scenario = scenario
        self._scenarios = scenarios
        self._this_rank = this_rank
        self._checked = False
        self._trainer: Trainer | None = run.prepare(
            scenarios.take(scenario) if steps.method.direction == "out" else None
        )
        self._raise_if_bad()

    def __repr__(self) -> str:
        return f"FsdpCase({self._scenario.id})"

    @property
    def scenario(self) -> Scenario:
        """The values of the axes, as attributes. ``scenario.id`` is the id in the matrix."""
        return self._scenario

    @property
    def model(self) -> nn.Module:
        return self._whole_trainer.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The scenario's optimizer of the model's parameters. Muon has only the matrices."""
        return self._whole_trainer.optimizer

    @property
    def state(self) -> Any:
        """The checkpoint for a test that loads, in the form that its ``promises`` name; None if the test extracts."""
        return self._steps.given.state

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Buffers that no state dict contains, by name, on the host; a test that loads a checkpoint needs them."""
        return self._steps.given.buffers

    @property
    def rank(self) -> int:
        return self._this_rank.rank

    @property
    def world_size(self) -> int:
        return self._this_rank.world_size

    @property
    def device(self) -> torch.device:
        """Returns this rank's compute device, wherever the shards are."""
        return self._this_rank.device

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh over which the model is sharded."""
        return self._whole_trainer.runtime.make_mesh(self._scenario.sharding)

    @property
    def control(self) -> dist.ProcessGroup:
        """A gloo group of all ranks that the model does not use."""
        return self._this_rank.control

    @property
    def scratch(self) -> pathlib.Path:
        """An existing directory for this test, the same on every rank."""
        return self._this_rank.scratch

    def train_step(self, *, unstage: bool = False) -> None:
        """Trains a step, after which extractions must return the new weights. Only for a test that extracts.

        Every rank must call this method. Before and after the step, the model is in the state of its scenario, for
        example offloaded.

        unstage: the same as for :meth:`check`.
        """
        __tracebackhide__ = True
        if self._steps.method.direction == "in":
            pytest.fail("fsdp_case.train_step() is for a test that extracts; a load is compared with its checkpoint")
        self._steps.undoes_staging = unstage
        trainer = self._whole_trainer
        with torch.inference_mode(False), torch.enable_grad():
            self._trainer = self._train_and_prepare(trainer)
        self._raise_if_bad()

    def _train_and_prepare(self, trainer: Trainer) -> Trainer | None:
        """Trains a prepared model for one step, and prepares it again with the model's new weights as the reference.

        Returns None if the step or the preparation raised.
        """
        with self._steps.record_exceptions():
            self._steps.recorder.enter("next step")
            self._steps.train_on(trainer)
            return self._run.prepare(trainer)
        return None

    def check(self, result: Any = None, *, unstage: bool = False) -> None:
        """Compares the result of the test with the model bit by bit, and then trains a step.

        Every rank must call this method once. A failure on any rank fails the test on every rank in the same way.

        result: for a test that extracts, a mapping or an iterable of (name, tensor), or a function that takes the model
            and returns such a result. The function is called twice, with a training step in between, to find weights
            that it keeps from the first call. ``fsdp_doctor.promises`` on the test declares the names, dtype, device
            and ranks of the result; the default is every name of the state dict, in the parameter's own dtype, on the
            compute device, on every rank. For a test that loads, the return value of the load, which tells the names
            that were not loaded; the model itself is compared.
        unstage: whether to move a module that was staged under CPUOffloadPolicy back to the CPU before the step. torch
            expects its shards there, and without the move the step fails, whatever was extracted.
        """
        __tracebackhide__ = True
        if self._checked:
            pytest.fail("fsdp_case.check() was called before: the scenario is already in its next step")
        self._checked = True
        self._steps.undoes_staging = unstage
        trained_on = self._check_call(result)
        if callable(result) and trained_on is not None:
            with torch.inference_mode(False), torch.enable_grad():
                self._trainer = self._run.prepare_second_call(trained_on)
            self._raise_if_bad()
            trained_on = self._check_call(result)
        if trained_on is not None:
            self._run.take_back(trained_on)
            self._scenarios.keep(trained_on)

    def _check_call(self, result: Any) -> Trainer | None:
        """Verifies one result, or one call, and trains a step. Returns the trainer if it can be used again."""
        __tracebackhide__ = True
        trainer = self._whole_trainer
        with torch.inference_mode(False), torch.enable_grad():
            self._run.exercise(trainer, lambda: result(trainer.model) if callable(result) else result, owned=False)
            trained_on = self._run.go_on(trainer)
        self._trainer = None
        self._raise_if_bad()
        return trained_on

    @property
    def _whole_trainer(self) -> Trainer:
        __tracebackhide__ = True
        if self._trainer is None:
            pytest.fail("fsdp_case cannot be used again: fsdp_case.check() has trained its model further")
        return self._trainer

    def _raise_if_bad(self) -> None:
        """Skips or fails the test on every rank for the same reason, so that no rank continues alone."""
        __tracebackhide__ = True
        reports = self._collect_reports()
        self._scenarios.whole = self._scenarios.whole and are_workers_whole(reports)
        verdict = classify(reports, self.world_size)
        if verdict.kind == "unsupported":
            pytest.skip(f"unsupported: {verdict.reason}")
        if verdict.bad:
            failure = self._run.record.failure
            frames = [select_frames(failure.traceback, kept=-1)] if failure is not None else []
            # If only some ranks failed, the reason already names them.
            where = "every rank: " if len(verdict.ranks) == self.world_size > 1 else ""
            pytest.fail("\n".join([f"{where}{verdict.kind}: {verdict.reason}", *verdict.also, *frames]))

    def _collect_reports(self) -> list[RankReport]:
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, self._run.record, group=self.control)
        records = (dataclasses.replace(record, done=True) for record in everyone)
        return [RankReport(rank=rank, record=record) for rank, record in enumerate(records)]
