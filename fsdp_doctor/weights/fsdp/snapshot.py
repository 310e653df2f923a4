"""Snapshot of a model's parts, and a check that the model still has them, which is cheaper than reading it again."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.private.fsdp1 import find_flat_handle, read_flat_shard, read_plan_facts
from fsdp_doctor.weights.fsdp.private.fsdp2 import find_moved_parameters


class Snapshot:
    """Facts about a model that show whether it has changed.

    It keeps the process group alive, but neither the model nor any of its tensors.
    """

    def __init__(self, model: nn.Module, contents: reader.ModelContents) -> None:
        modules, names, tensors = private.list_modules_and_tensors(reader.find_innermost(model))
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        self._modules = [weakref.ref(module) for module in modules]
        self._fsdp2_states = [weakref.ref(unit.state) for unit in contents.fsdp2_units]
        self._units = [weakref.ref(unit.module) for unit in contents.fsdp1_units]
        # A parameter that FSDP2 shows unsharded has no place: the model has to be read again.
        self._places = [places.get(id(tensor.tensor), -1) for tensor in contents.list_tensors()]
        self._facts = self._read_facts(modules, names, tensors)

    def find_shards(self, model: nn.Module) -> list[torch.Tensor] | None:
        """Finds this rank's shards, in the order of the FSDP1 units and of ``ModelContents.list_tensors``.

        Returns None if the model has changed.
        """
        modules, names, tensors = private.list_modules_and_tensors(reader.find_innermost(model))
        if -1 in self._places or [known() for known in self._modules] != modules:
            return None
        if self._read_facts(modules, names, tensors) != self._facts:
            return None
        if any(find_moved_parameters(state) for known in self._fsdp2_states if (state := known()) is not None):
            return None
        units = [read_flat_shard(find_flat_handle(unit)) for known in self._units if (unit := known())]
        return [*units, *(private.read_local_tensor(tensors[place]) for place in self._places)]  # type: ignore[arg-type]

    def _read_facts(self, modules: list[nn.Module], names: list[Any], tensors: list[torch.Tensor | None]) -> Any:
        """Reads all facts on which a plan depends.

        Tensors are compared by id and by further facts, because a new tensor can get the id of a freed one.
        """
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        units = [read_plan_facts(find_flat_handle(unit)) for known in self._units if (unit := known())]
        return [group, len(modules), names, units, list(map(_read_tensor, tensors))]


def _read_tensor(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    placed = None
    if isinstance(tensor, DTensor):
        # Meshes of the same ranks are equal, whatever their groups are.
        placed = id(tensor), private.read_spec(tensor), id(tensor.device_mesh)
        tensor = private.read_local_tensor(tensor)
    return id(tensor) if placed is None else placed, tensor.shape, tensor.stride(), tensor.dtype, tensor.device
