"""Targets of a load: every tensor of a sharded model, with this rank's part of it, and the model's ranks."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate

from fsdp_doctor.text import join_some
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.decorators import defer_garbage_collection
from fsdp_doctor.weights.fsdp.expert_groups import extend_mesh
from fsdp_doctor.weights.fsdp.reader import Fsdp1Unit, ModelContents, ModelTensor
from fsdp_doctor.weights.fsdp.shards import Slices
from fsdp_doctor.weights.load.layouts import (
    InFlatParameter,
    Layout,
    Layouts,
    ShardsOfUnit,
    list_mesh_ranks,
)
from fsdp_doctor.weights.load.outcome import LoadError
from fsdp_doctor.weights.load.source import check_value
from fsdp_doctor.weights.transport.rank_groups import Comparison, read_groups
from fsdp_doctor.weights.transport.sources import find_device, list_shards

# A group that is made for a load: all ranks come to its collectives at the same time.
_GROUP_TIMEOUT = datetime.timedelta(minutes=5)


@dataclass(slots=True, eq=False, kw_only=True)
class Target:
    """Tensor to be filled.

    names: all names of the tensor, any of which the source may have.
    shape, dtype: the shape and dtype of the full tensor.
    shard: a function that returns this rank's shard, or a view of it, with as many elements as the layout says. It
        first gives memory to a shard on the meta device.
    """

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    layout: Layout
    shard: Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ModelPlace:
    """Ranks and devices of a model.

    ranks: the ranks that take part; the first rank of the model's mesh is rank 0 of the load.
    known_group: an existing group of exactly these ranks, or None.
    device: the device on which this rank communicates.
    meshes: the meshes that have all ranks.
    partial: names of tensors that rank 0 cannot divide: their mesh has only some of the ranks, and is not a submesh of
        a mesh of all ranks.
    """

    ranks: tuple[int, ...]
    known_group: dist.ProcessGroup | None
    device: torch.device
    meshes: tuple[DeviceMesh, ...]
    partial: tuple[str, ...]

    @property
    def first(self) -> int:
        return self.ranks[0]

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the ranks.

        If no existing group is known, one is made, for which each rank waits for all others.
        """
        return self.known_group or _make_group(self.ranks, _find_world())


def find_place(contents: ModelContents, *, otherwise: str) -> ModelPlace:
    """Finds the ranks and devices of a model. Raises LoadError if it is not sharded, or if its ranks are unknown.

    otherwise: what a caller whose model is not sharded can do instead; a part of the error's sentence.
    """
    if not contents.fsdp1_units and not list_meshes(contents):
        raise LoadError(f"the model is not sharded: {otherwise}, or shard it first")
    if contents.refusal:
        raise LoadError(contents.refusal)
    if not dist.is_initialized():
        raise LoadError("the model is sharded, but torch.distributed is not initialized, or no longer initialized")
    ranks = contents.ranks
    if others := [part for part in contents.list_ranks_of_parts() if not set(part) <= set(ranks)]:
        raise LoadError(
            f"the model is on ranks {list(ranks)}, but a part of it is on {list(others[0])}: load both parts separately"
        )
    meshes = tuple(
        mesh for mesh in list_meshes(contents) if mesh.size() == len(ranks) and list_mesh_ranks(mesh)[0] == ranks[0]
    )
    all_meshes = list_meshes(contents)
    device = find_device(all_meshes[0].device_type) if all_meshes else contents.fsdp1_units[0].compute_device
    known_group = _find_known_group(contents, ranks)
    if len(ranks) > 1 and not private.has_backend_for(known_group or _find_world(), device):
        raise LoadError(
            f"the model's process group has no backend for {device.type}: initialize the group with one, as in "
            f'init_process_group("cpu:gloo,cuda:nccl")'
        )
    return ModelPlace(
        ranks=ranks,
        known_group=known_group,
        device=device,
        meshes=meshes,
        partial=_find_partial(contents, ranks, meshes),
    )


@defer_garbage_collection
def list_targets(contents: ModelContents, place: ModelPlace) -> list[Target]:
    """Lists each parameter and persistent buffer once, in the order of the model, but those in FSDP1 units first."""
    if unused := contents.list_unused(but_followed=True):
        raise LoadError(
            f"FSDP2 does not compute with the model's present {join_some(unused)}: another parameter was assigned "
            "after the first forward, and the next forward restores the former parameter. Copy values into the "
            "former parameter instead"
        )
    layouts, rank = Layouts(place.ranks, place.meshes), dist.get_rank()
    targets = [target for unit in contents.fsdp1_units for target in _list_targets_of_unit(unit, place)]
    targets += [
        _make_target(tensor, layouts.choose(tensor.placed), rank, place.device) for tensor in contents.list_tensors()
    ]
    return targets


def describe_targets(targets: Sequence[Target]) -> list[str]:
    """Returns a line for each target with the facts that must be the same on all ranks."""
    return [f"{' = '.join(t.names)}: {list(t.shape)} {t.dtype} {t.layout}" for t in targets]


def compare_groups(contents: ModelContents, place: ModelPlace) -> Comparison:
    """Makes the comparison that finds names under which groups of ranks have different tensors, which no load can
    write.
    """
    return Comparison(read_groups(contents), list_shards(contents), place.device, compares=["plain"])


def find_home(tensor: ModelTensor, compute_device: torch.device) -> torch.device:
    """Returns the device on which a parameter or buffer trains: the CPU for a DTensor under CPUOffloadPolicy."""
    is_offloaded = tensor.unit is not None and isinstance(tensor.unit.policy, CPUOffloadPolicy)
    return torch.device("cpu") if is_offloaded and isinstance(tensor.tensor, DTensor) else compute_device


def match_transient_values(
    buffers: Sequence[ModelTensor], supplied: Mapping[str, torch.Tensor], device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs the non-persistent buffers, which no checkpoint has, with the values that the caller supplies.

    device: the device of the values for buffers on the meta device.

    Raises LoadError for a buffer on the meta device that is not supplied, and for values that do not fit.
    """
    by_name = {name: buffer for buffer in buffers for name in buffer.names}
    if unknown := [name for name in supplied if name not in by_name]:
        raise LoadError(f"buffers: the model has no non-persistent buffers of these names: {join_some(unknown)}")
    if empty := [b.names[0] for b in buffers if b.tensor.is_meta and not supplied.keys() & set(b.names)]:
        raise LoadError(
            f"{len(empty)} non-persistent buffers are on the meta device, and no checkpoint has them; pass them as "
            f"buffers={{name: tensor}}: {join_some(empty)}"
        )
    for name, value in supplied.items():
        check_value(name, value)
        buffer = by_name[name].tensor
        if (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
            raise LoadError(
                f"buffers: {name} is {list(value.shape)} of {value.dtype}, but {list(buffer.shape)} of "
                f"{buffer.dtype} in the model"
            )
    pairs = ((by_name[name].tensor, value.detach()) for name, value in supplied.items())
    return [(buffer, value.to(device, copy=True) if buffer.is_meta else value) for buffer, value in pairs]


def replace_memory(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Gives a tensor on the meta device the memory of another tensor. The tensor stays the same object with the same
    attributes.

    An existing optimizer therefore keeps its parameters, and ties are kept. Raises LoadError if torch does not allow
    this because something else, such as a graph, refers to the tensor.
    """
    new = nn.Parameter(other, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
    new.__class__ = type(tensor)
    new.__dict__.update(tensor.__dict__)
    try:
        torch.utils.swap_tensors(tensor, new)
    except RuntimeError as error:
        raise LoadError(f"cannot allocate memory for a tensor on the meta device: {error}") from error


def list_meshes(contents: ModelContents) -> list[DeviceMesh]:
    meshes = (
        parameter.placed.device_mesh for parameter in contents.parameters if isinstance(parameter.placed, DTensor)
    )
    return list({id(mesh): mesh for mesh in meshes}.values())


def _find_partial(contents: ModelContents, ranks: tuple[int, ...], meshes: tuple[DeviceMesh, ...]) -> tuple[str, ...]:
    is_over_all = {
        id(mesh): extend_mesh(mesh, (Replicate(),) * mesh.ndim, meshes) is not None for mesh in list_meshes(contents)
    }
    tensors = ((parameter.names[0], parameter.placed) for parameter in contents.parameters)
    names = [name for name, t in tensors if isinstance(t, DTensor) and not is_over_all[id(t.device_mesh)]]
    return (*names, *(unit.flat_name for unit in contents.fsdp1_units if unit.ranks != ranks))


def _find_known_group(contents: ModelContents, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    groups = [mesh.get_group() for mesh in list_meshes(contents) if mesh.ndim == 1]
    groups += [*(unit.group for unit in contents.fsdp1_units), _find_world()]
    return next((group for group in groups if sorted(dist.get_process_group_ranks(group)) == sorted(ranks)), None)


def _find_world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@functools.lru_cache(maxsize=1)
def _make_group(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Makes a process group, which is kept for all loads with the same default group."""
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=_GROUP_TIMEOUT, use_local_synchronization=True)
    return group


def _make_target(contents: ModelTensor, layout: Layout, rank: int, compute_device: torch.device) -> Target:
    tensor, unit, shape = contents.tensor, contents.unit, contents.placed.shape
    device = find_home(contents, compute_device)
    local = private.read_local_tensor(tensor)
    if local.numel() != layout.compute_part(shape, rank).shape.numel():
        raise LoadError(f"{contents.names[0]}: this rank holds {local.numel()} elements, which contradicts {layout}")
    if any(length > 1 and not stride for length, stride in zip(local.shape, local.stride(), strict=True)):
        raise LoadError(
            f"{contents.names[0]} is expanded: several of its elements share memory; clone the tensor before the load"
        )

    def shard() -> torch.Tensor:
        if private.read_local_tensor(tensor).is_meta:
            replace_memory(tensor, torch.empty_like(tensor, device=device))
            if unit is not None and isinstance(tensor, nn.Parameter):
                unit.follow_materialized(tensor)
        return private.read_local_tensor(tensor).detach()

    return Target(names=contents.names, shape=shape, dtype=tensor.dtype, layout=layout, shard=shard)


def _list_targets_of_unit(unit: Fsdp1Unit, place: ModelPlace) -> Iterator[Target]:
    if unit.is_summoned:
        raise LoadError("the model is inside summon_full_params, which would overwrite the loaded weights")
    flat = unit.shard
    if flat.is_meta:
        raise LoadError(f"{unit.flat_name} is on the meta device, and FSDP1 cannot be loaded there")
    if unit.is_recast:
        raise LoadError(
            f"{unit.flat_name} was cast after the first forward, and FSDP1 keeps it in two dtypes: cast it "
            "back to the old dtype"
        )
    shards = ShardsOfUnit(unit, place.first)
    for names, piece in zip(unit.names, unit.read_layout(), strict=True):
        layout = InFlatParameter(shards, piece.offset, piece.stride)
        shard = functools.partial(_view_part_of_unit, unit, layout.find_slices(piece.shape))
        yield Target(names=names, shape=piece.shape, dtype=flat.dtype, layout=layout, shard=shard)


def _view_part_of_unit(unit: Fsdp1Unit, slices: Slices) -> torch.Tensor:
    """Returns a view of the memory of a unit's shard; called only after ``unite_memories``."""
    return unit.memories[0][slices]
