"""Snapshot of a model's parts, and a check that the model still has them, which is cheaper than reading it again."""

from __future__ import annotations

import operator
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.private.fsdp1 import find_flat_handle, read_flat_shard, read_plan_facts
from fsdp_doctor.weights.fsdp.private.fsdp2 import find_moved_parameters

_READ_MESH, _READ_LAYOUT = operator.attrgetter("mesh"), operator.attrgetter("shape", "dtype", "device")


class Snapshot:
    """Facts about a model that show whether it has changed.

    A snapshot keeps the process group alive, but neither the model nor any of the model's tensors.
    """

    def __init__(self, model: nn.Module, contents: reader.ModelContents) -> None:
        self._units = [weakref.ref(unit.module) for unit in contents.fsdp1_units]
        self._fsdp2_states = [weakref.ref(unit.state) for unit in contents.fsdp2_units]
        modules, tensors, _, self._facts = self._read_facts(model)
        self._modules = [weakref.ref(module) for module in modules]
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        # A parameter that FSDP2 shows unsharded has no place: the model has to be read again.
        self._places = [places.get(id(tensor.tensor), -1) for tensor in contents.list_tensors()]

    def find_shards(self, model: nn.Module) -> list[torch.Tensor] | None:
        """Finds this rank's shards, in the order of the FSDP1 units and of ``ModelContents.list_tensors``.

        Returns None if the model has changed.
        """
        modules, _, local_tensors, facts = self._read_facts(model)
        if -1 in self._places or [known() for known in self._modules] != modules or facts != self._facts:
            return None
        if any(find_moved_parameters(state) for known in self._fsdp2_states if (state := known()) is not None):
            return None
        units = [read_flat_shard(find_flat_handle(unit)) for known in self._units if (unit := known())]
        return [*units, *(local_tensors[place] for place in self._places)]

    def _read_facts(
        self, model: nn.Module
    ) -> tuple[list[nn.Module], list[torch.Tensor], list[torch.Tensor], list[object]]:
        """Reads all facts on which a plan depends. Returns (modules, tensors, local tensors, facts).

        Tensors are compared by id and by further facts, because a new tensor can get the id of a freed one. Each fact
        is one list over all tensors, because a function call for each tensor would be slower.
        """
        modules, names, listed = private.list_modules_and_tensors(reader.find_innermost(model))
        tensors = [tensor for tensor in listed if tensor is not None]
        local_tensors = list(map(private.read_local_tensor, tensors))
        specs = [private.read_spec(tensor) for tensor in tensors if isinstance(tensor, DTensor)]
        # Meshes of the same ranks are equal, whatever their groups are.
        meshes = list(map(id, map(_READ_MESH, specs)))
        layouts, strides = list(map(_READ_LAYOUT, local_tensors)), list(map(torch.Tensor.stride, local_tensors))
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        units = [read_plan_facts(find_flat_handle(unit)) for known in self._units if (unit := known())]
        facts: list[object] = [
            group,
            len(modules),
            names,
            units,
            list(map(id, listed)),
            specs,
            meshes,
            layouts,
            strides,
        ]
        return modules, tensors, local_tensors, facts
