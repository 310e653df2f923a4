"""One extraction case on one rank: the offload, the path, what it yields, what it leaves behind, the next step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fsdp_doctor.case import reference, training_state, verification
from fsdp_doctor.case.case_run import Assignment, CaseRun
from fsdp_doctor.case.draining_run import DrainingRun, ExtractionCall
from fsdp_doctor.case.lora_reference import merged_weights
from fsdp_doctor.case.shard_reference import own_parts
from fsdp_doctor.case.trainer import Trainer, compute_dtype
from fsdp_doctor.fsdp import private, reader
from fsdp_doctor.ledgers.stage_ledger import JobStage
from fsdp_doctor.memory.stage_watch import StageWatch, Unwatched
from fsdp_doctor.verdict.records import Problem


class ExtractionRun(CaseRun, DrainingRun):
    """A path that extracts weights. ``truth``: what they are, once the scenario is in its state."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment)
        self.truth = reference.Reference()
        self._earlier: verification.ExpectedYield | None = None
        self._watch = Unwatched()

    @contextlib.contextmanager
    def _in_life(self, stage: JobStage, path: str = "") -> Iterator[None]:
        """A stage in the life of the job, whose ledger becomes part of the record."""
        with self._watch.stage(stage, path):
            yield
        self._add(ledgers=(*self.record.ledgers, *self._watch.take()))

    def _new_trainer(self) -> Trainer:
        scenario, runtime = self._case.scenario, self._runtime
        self._watch = StageWatch(scenario.id, runtime.rank, runtime.device) if runtime.with_ledgers else Unwatched()
        with self._in_life("built"):
            trainer = Trainer(scenario, runtime, with_mesh=not self._path.without_mesh)
            trainer.watch = self._watch
            trainer.watch.of(trainer.model, trainer.optimizer)
        if scenario.phase == "trained":
            with self._in_life("first step"):
                trainer.step()
            # A second step: the first one allocates what stays (Adam's state, cuBLAS workspaces).
            with self._in_life("trained"):
                trainer.step()
            # As every later cycle leaves it: loading the optimizer takes Adam's step counters, which a step
            # makes on the host, to the device with the rest of the state.
            trainer.resume()
        return trainer

    def _train_on(self, trainer: Trainer) -> None:
        self._enter("next step")
        with self._in_life("offloaded again", self._path.name):
            trainer.unstage(undo_staging=self.undoes_staging)
        with self._in_life("loaded", self._path.name):
            trainer.load()
        self._check_weights(trainer.model, self.truth, "the next training step would start from other weights")
        with self._in_life("trained again", self._path.name):
            trainer.step()
            self._runtime.synchronize()
        self._earlier = self._expected
        if self._holds_weights and not training_state.lost_weights(trainer.model, self.truth):
            self._add(problems=(Problem(kind="poisoned", detail="the next training step changes no weight"),))

    @property
    def _holds_weights(self) -> bool:
        """Whether there is anything on this rank that a step could change."""
        return any(shard.numel() for shard in (*self.truth.flat.values(), *self.truth.local.values()))

    def _is_reusable(self, trainer: Trainer) -> bool:
        return self._case.scenario.phase == "trained"

    def _bring_to_state(self, trainer: Trainer) -> None:
        self._watch = trainer.watch
        self._enter("reference")
        optimizer = trainer.optimizer if self._contract.form == "optimizer" else None
        self.truth = reference.take(trainer.model, optimizer, self._runtime)
        self._enter("offload")
        with self._in_life("offloaded"):
            trainer.offload()
        if self._case.scenario.staging == "staged":
            self._enter("staging")
            with self._in_life("staged"):
                trainer.stage()
        self._note_state(trainer.model, trainer.optimizer, self.truth)
        merged = merged_weights(trainer.model, self.truth.full)
        self._expected = verification.ExpectedYield(
            contract=self._contract,
            reference=self.truth,
            rank=self._runtime.rank,
            compute_device=self._runtime.device,
            compute_dtype=compute_dtype(self._case.scenario.precision),
            parameter_devices=verification.parameter_devices(trainer.model),
            shard_group_of_one=self._case.scenario.sharding in ("size1", "replicate") or self._runtime.world_size == 1,
            merged_weights=merged,
            own_parts=own_parts(trainer.model, self.truth.full, merged) if self._contract.form == "local" else {},
            earlier=self._earlier,
        )

    def _verify(self, trainer: Trainer, call: Callable[[], Any], owned: bool) -> None:
        extraction = ExtractionCall(
            call=lambda: self._watch.yielding(call()),
            own=trainer.tensor_ids(),
            offloaded_bytes=_shard_bytes(trainer.model, self._runtime.device) if self._path.offloads else 0,
            owned=owned,
        )
        self._extract(trainer.model, trainer.optimizer, extraction, self._expected)

    def _drain(self, extraction: ExtractionCall, verifier: verification.Verifier) -> None:
        with self._in_life("extracted", self._path.name):
            super()._drain(extraction, verifier)


def _shard_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes of this rank's shards that lie on the device."""
    shards = [private.local_tensor(tensor.shown) for tensor in reader.read(model).tensors()]
    return sum(shard.nbytes for shard in shards if shard.device == device)
