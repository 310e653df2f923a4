"""A checkpoint in the form that a loading path asks for; made by hand where torch would be a path under test."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard
from typing_extensions import assert_never

from fsdp_doctor.case import framework_saves, lora_reference
from fsdp_doctor.case.checkpoints import EXTRA_SHAPE, Checkpoint, as_saved
from fsdp_doctor.case.held_pieces import expected_part
from fsdp_doctor.case.trainer import Trainer
from fsdp_doctor.fsdp import reader
from fsdp_doctor.matrix.axes import CheckpointFit
from fsdp_doctor.matrix.contracts import Contract


class CheckpointForms:
    """Makes of a checkpoint what a path is given. Every rank must call every method alike."""

    def __init__(self, checkpoint: Checkpoint, fit: CheckpointFit, trainer: Trainer, scratch: pathlib.Path) -> None:
        self._checkpoint = checkpoint
        self._fit = fit
        self._trainer = trainer
        self._runtime = trainer.runtime
        self._scratch = scratch

    def state(self, contract: Contract) -> Any:
        """The argument ``state`` of a path with that contract."""
        match contract.given:
            case "full":
                return self._full(contract)
            case "sharded":
                return self._of_loads(contract, self._sharded_weights(), self._optimizer_state(sharded=True))
            case "dcp":
                return self._dcp()
            case "rank_files":
                return self._rank_files()
            case _:
                assert_never(contract.given)

    def _full(self, contract: Contract) -> Any:
        if contract.ranks == "rank0" and self._runtime.rank != 0:
            return self._of_loads(contract, {}, {})
        weights = as_saved(self._checkpoint, self._fit)
        if contract.weights == "adapter":
            weights = lora_reference.adapter_weights(weights)
        return self._of_loads(contract, weights, self._optimizer_state(sharded=False))

    def _of_loads(self, contract: Contract, weights: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
        match contract.loads:
            case "model":
                return weights
            case "optimizer":
                return optimizer
            case "both":
                return {"model": weights, "optimizer": optimizer}
            case _:
                assert_never(contract.loads)

    def _dcp(self) -> pathlib.Path:
        if self._checkpoint.directory:
            return self._checkpoint.directory / framework_saves.DCP
        state = {"model": self._sharded_weights(), "optimizer": self._optimizer_state(sharded=True)}
        dcp.save(state, checkpoint_id=self._scratch)
        dist.barrier(group=self._runtime.control)
        return self._scratch

    def _rank_files(self) -> pathlib.Path:
        """As verl's FSDPCheckpointManager names them."""
        if self._checkpoint.directory:
            return self._checkpoint.directory / framework_saves.RANK_FILES
        self._scratch.mkdir(parents=True, exist_ok=True)
        suffix = f"world_size_{self._runtime.world_size}_rank_{self._runtime.rank}.pt"
        torch.save(self._sharded_weights(), self._scratch / f"model_{suffix}")
        torch.save(self._checkpoint.raw_optimizer, self._scratch / f"optim_{suffix}")
        dist.barrier(group=self._runtime.control)
        return self._scratch

    def _sharded_weights(self) -> dict[str, Any]:
        like = self._sharded_names()
        weights = as_saved(self._checkpoint, self._fit)
        return {name: self._sharded(like.get(name), tensor) for name, tensor in weights.items()}

    def _sharded_names(self) -> dict[str, torch.Tensor | None]:
        """By name the tensor that a sharded entry is divided like; None for one that FSDP1 shards by its first dim."""
        held = reader.read(self._trainer.model)
        like: dict[str, torch.Tensor | None] = {name: t.tensor for t in held.tensors() for name in t.names}
        return like | dict.fromkeys(name for unit in held.fsdp1_units for names in unit.names for name in names)

    def _sharded(self, like: torch.Tensor | None, full: torch.Tensor) -> torch.Tensor:
        device = self._runtime.device
        if isinstance(like, DTensor):
            mesh, placements = like.device_mesh, like.placements
            local = expected_part(like, full).clone().to(device)
        elif like is None and self._is_in_shards(full):
            mesh = self._runtime.mesh(self._trainer.scenario.sharding)
            placements = (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0))
            chunks = full.chunk(mesh.size(mesh.ndim - 1))
            index = mesh.get_local_rank(mesh.ndim - 1)
            local = (chunks[index] if index < len(chunks) else full[:0]).clone().to(device)
        else:
            return full.clone().to(device)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=full.shape, stride=full.contiguous().stride()
        )

    def _is_in_shards(self, full: torch.Tensor) -> bool:
        """Whether FSDP1's sharded state dict has it as a DTensor: a shard group of one has no sharded state dict."""
        is_its_own = bool(full.ndim) and full.shape != EXTRA_SHAPE and self._trainer.scenario.version == 1
        mesh = self._runtime.mesh(self._trainer.scenario.sharding)
        return is_its_own and mesh.size(mesh.ndim - 1) > 1

    def _optimizer_state(self, *, sharded: bool) -> dict[str, Any]:
        """As ``get_optimizer_state_dict`` has it: by parameter names."""
        like = self._sharded_names()
        state: dict[str, dict[str, Any]] = {}
        for name, full in self._checkpoint.moments.items():
            parameter, _, key = name.rpartition(".")
            value = self._sharded(like[parameter], full) if sharded and full.ndim else full.clone()
            state.setdefault(parameter, {})[key] = value
        buffers = {name for buffer in reader.read(self._trainer.model).buffers for name in buffer.names}
        names = [name for name in like if name not in buffers and name not in self._checkpoint.tied_names]
        return {"state": state, "param_groups": [{**self._checkpoint.options, "params": names}]}
