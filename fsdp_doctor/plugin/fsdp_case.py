"""The fixture ``fsdp_case``: a scenario of the matrix whose path is the test's own code."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_doctor.case.case_run import CaseRun
from fsdp_doctor.case.trainer import Trainer
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.plugin.this_rank import ThisRank
from fsdp_doctor.verdict.classification import classify, workers_are_whole
from fsdp_doctor.verdict.records import RankReport

# All offloads, staged and not, of one strategy.
_MOST_KEPT = 16


class KeptScenarios:
    """The trainers of scenarios that tests have left whole, on this rank; the same ones on every rank.

    whole: whether all ranks have ended every case alike, so that others can follow in the same workers.
    """

    def __init__(self) -> None:
        self.whole = True
        self._trainers: dict[Scenario, Trainer] = {}

    def take(self, scenario: Scenario) -> Trainer | None:
        return self._trainers.pop(scenario, None)

    def keep(self, trainer: Trainer) -> None:
        """Lets the one go that was kept longest, where there are many."""
        if len(self._trainers) == _MOST_KEPT:
            del self._trainers[next(iter(self._trainers))]
        self._trainers[trainer.scenario] = trainer


class FsdpCase:
    """A sharded model and its optimizer in the state of a scenario: trained, offloaded, perhaps staged.

    The same on every rank; :meth:`check` is to be called by every rank.
    """

    def __init__(self, run: CaseRun, scenario: Scenario, scenarios: KeptScenarios, this_rank: ThisRank) -> None:
        self._run = run
        self._scenario = scenario
        self._scenarios = scenarios
        self._this_rank = this_rank
        self._checked = False
        self._trainer: Trainer | None = run.prepare(scenarios.take(scenario) if run.direction == "out" else None)
        self._raise_if_bad()

    def __repr__(self) -> str:
        return f"FsdpCase({self._scenario.id})"

    @property
    def scenario(self) -> Scenario:
        """The values of the axes, by their names; ``scenario.id`` as in the matrix."""
        return self._scenario

    @property
    def model(self) -> nn.Module:
        return self._whole_trainer.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW over the model's parameters."""
        return self._whole_trainer.optimizer

    @property
    def state(self) -> Any:
        """What a test that loads is given, in the form that its ``promises`` name; None of one that extracts."""
        return self._run.given.state

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Of a test that loads: the buffers that no state dict has, by name, on the host."""
        return self._run.given.buffers

    @property
    def rank(self) -> int:
        return self._this_rank.rank

    @property
    def world_size(self) -> int:
        return self._this_rank.world_size

    @property
    def device(self) -> torch.device:
        """This rank's compute device, wherever the shards are."""
        return self._this_rank.device

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh over which the model is sharded."""
        return self._whole_trainer.runtime.mesh(self._scenario.sharding)

    @property
    def control(self) -> dist.ProcessGroup:
        """A gloo group of all ranks that the model does not use."""
        return self._this_rank.control

    @property
    def scratch(self) -> pathlib.Path:
        """A directory that is there, of this test alone and the same on every rank."""
        return self._this_rank.scratch

    def check(self, result: Any = None, *, unstage: bool = False) -> None:
        """Holds what the test has done against what the model was, bit by bit, and then trains a step.

        result: of a test that extracts, a mapping, or what yields (name, tensor). What it promises (names, dtype,
        device, which ranks have data) is what ``fsdp_doctor.promises`` on the test says, and by default what a path of
        the matrix does: every name of the state dict, in the parameter's own dtype, on the compute device, on every
        rank.
        Of a test that loads, what the load returned, for the names that it did not load; the model is compared.

        unstage: before that step a module that was staged under CPUOffloadPolicy is moved back to the CPU, where torch
        expects its shards. Nothing trains there without it, whatever was extracted.

        Fails the test on every rank alike with what was found on any. Every rank must call it, once.
        """
        __tracebackhide__ = True
        if self._checked:
            pytest.fail("fsdp_case.check() was called before: the scenario has gone on to its next step")
        self._checked = True
        self._run.undoes_staging = unstage
        trainer = self._whole_trainer
        with torch.inference_mode(False), torch.enable_grad():
            self._run.exercise(trainer, lambda: result, owned=False)
            reusable = self._run.go_on(trainer)
        self._trainer = None
        self._raise_if_bad()
        if reusable is not None:
            self._scenarios.keep(reusable)

    @property
    def _whole_trainer(self) -> Trainer:
        __tracebackhide__ = True
        if self._trainer is None:
            pytest.fail("fsdp_case is used up: fsdp_case.check() has trained its model on")
        return self._trainer

    def _raise_if_bad(self) -> None:
        """On every rank for the same reason, so that the ranks stay together."""
        __tracebackhide__ = True
        reports = self._reports()
        self._scenarios.whole = self._scenarios.whole and workers_are_whole(reports)
        verdict = classify(reports, self.world_size)
        if verdict.kind == "unsupported":
            pytest.skip(f"unsupported: {verdict.reason}")
        if verdict.bad:
            failure = self._run.record.failure
            # It is shown with what the rank printed; the message is the same on all ranks.
            sys.stderr.write(failure.traceback if failure is not None else "")
            pytest.fail("\n".join([f"{verdict.kind}: {verdict.reason}", *verdict.also]))

    def _reports(self) -> list[RankReport]:
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, self._run.record, group=self.control)
        records = (dataclasses.replace(record, done=True) for record in everyone)
        return [RankReport(rank=rank, record=record) for rank, record in enumerate(records)]
