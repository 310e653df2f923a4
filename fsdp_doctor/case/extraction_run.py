"""One extraction case on one rank: the offload, the path, what it yields, what it leaves behind, the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_doctor.case import reference, verification
from fsdp_doctor.case.case_run import Assignment, CaseRun
from fsdp_doctor.case.draining_run import DrainingRun, ExtractionCall
from fsdp_doctor.case.lora_reference import merged_weights
from fsdp_doctor.case.shard_reference import own_parts
from fsdp_doctor.case.trainer import COMPUTE_DTYPE, Trainer
from fsdp_doctor.fsdp import private, reader


class ExtractionRun(CaseRun, DrainingRun):
    """A path that extracts weights. ``truth``: what they are, once the scenario is in its state."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment)
        self.truth = reference.Reference()

    def _new_trainer(self) -> Trainer:
        trainer = Trainer(self._case.scenario, self._runtime, with_mesh=not self._path.without_mesh)
        if self._case.scenario.phase == "trained":
            trainer.step()
            # A second step: the first one allocates what stays (Adam's state, cuBLAS workspaces).
            trainer.step()
            # As every later cycle leaves it: loading the optimizer takes Adam's step counters, which a step
            # makes on the host, to the device with the rest of the state.
            trainer.resume()
        return trainer

    def _train_on(self, trainer: Trainer) -> None:
        self._enter("next step")
        trainer.resume(undo_staging=self.undoes_staging)
        self._check_weights(trainer.model, self.truth, "the next training step would start from other weights")
        trainer.step()
        self._runtime.synchronize()

    def _is_reusable(self, trainer: Trainer) -> bool:
        return self._case.scenario.phase == "trained"

    def _bring_to_state(self, trainer: Trainer) -> None:
        self._enter("reference")
        optimizer = trainer.optimizer if self._contract.form == "optimizer" else None
        self.truth = reference.take(trainer.model, optimizer, self._runtime)
        self._enter("offload")
        trainer.offload()
        if self._case.scenario.staging == "staged":
            self._enter("staging")
            trainer.stage()
        self._note_state(trainer.model, trainer.optimizer, self.truth)
        merged = merged_weights(trainer.model, self.truth.full)
        self._expected = verification.ExpectedYield(
            contract=self._contract,
            reference=self.truth,
            rank=self._runtime.rank,
            compute_device=self._runtime.device,
            compute_dtype=COMPUTE_DTYPE,
            parameter_devices=verification.parameter_devices(trainer.model),
            shard_group_of_one=self._case.scenario.sharding in ("size1", "replicate") or self._runtime.world_size == 1,
            merged_weights=merged,
            own_parts=own_parts(trainer.model, self.truth.full, merged) if self._contract.form == "local" else {},
        )

    def _verify(self, trainer: Trainer, call: Callable[[], Any], owned: bool) -> None:
        extraction = ExtractionCall(
            call=call,
            own=trainer.tensor_ids(),
            offloaded_bytes=_shard_bytes(trainer.model, self._runtime.device) if self._path.offloads else 0,
            owned=owned,
        )
        self._extract(trainer.model, trainer.optimizer, extraction, self._expected)


def _shard_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes of this rank's shards that lie on the device."""
    shards = [private.local_tensor(tensor.shown) for tensor in reader.read(model).tensors()]
    return sum(shard.nbytes for shard in shards if shard.device == device)
