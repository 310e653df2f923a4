"""What a load fills: every tensor of the model, and where this rank's part of it lies."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from fsdp_doctor.errors import some
from fsdp_doctor.extract.rank_groups import Comparison, read_groups
from fsdp_doctor.extract.sources import device_of, shards_of
from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.garbage_collection import without_garbage_collection
from fsdp_doctor.fsdp.reader import Fsdp1Unit, HeldModel, HeldTensor
from fsdp_doctor.fsdp.shards import Slices
from fsdp_doctor.load.layouts import InFlatParameter, Layout, Layouts, ShardsOfUnit, mesh_ranks, over_all_ranks
from fsdp_doctor.load.materialization import materialize
from fsdp_doctor.load.outcome import LoadError

# Of a group that is made for loads: its collectives begin on all ranks at once.
_PATIENCE = datetime.timedelta(minutes=5)


@dataclass(slots=True, eq=False, kw_only=True)
class Target:
    """One tensor, each once.

    names: all of them, any of which the source may have. shape, dtype: of the full tensor. shard: this rank's part
    where it lies, of as many elements as the layout gives it; a tensor on the meta device is given memory then.
    """

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    layout: Layout
    shard: Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Where a model lies.

    ranks: those that take part, rank 0 first, which is the first of the model's mesh. known_group: one of all of them
    that there is, None if it has to be made. device: where this rank communicates. meshes: those that have all of the
    ranks. partial: the first names of the tensors of which rank 0 does not know who has what: they are sharded over a
    part of the ranks, which is no submesh of one of all.
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
        """Where none is known, each rank waits here until all others have come, too."""
        return self.known_group or _new_group(self.ranks, _world())


def ranks_of(held: HeldModel) -> tuple[int, ...]:
    """Those that the largest part of the model is on; none where nothing is sharded."""
    return max(_ranks_of_parts(held), key=len, default=())


def loaded_model(held: HeldModel) -> LoadedModel:
    """Raises LoadError for a model that is not sharded, or whose ranks cannot be told."""
    if not held.fsdp1_units and not _meshes(held):
        raise LoadError("the model is not sharded: load it with model.load_state_dict, or shard it first")
    if held.stray_pieces:
        raise LoadError(held.stray_sentence)
    if not dist.is_initialized():
        raise LoadError("the model is sharded, and torch.distributed is not initialized, or not any more")
    of_parts = _ranks_of_parts(held)
    ranks = max(of_parts, key=len)
    if strange := [some for some in of_parts if not set(some) <= set(ranks)]:
        raise LoadError(f"the model is on ranks {list(ranks)}, and a part of it on {list(strange[0])}: load them apart")
    meshes = tuple(mesh for mesh in _meshes(held) if mesh.size() == len(ranks) and mesh_ranks(mesh)[0] == ranks[0])
    device, known_group = _compute_device(held), _known_group(held, ranks)
    if len(ranks) > 1 and not private.has_backend_for(known_group or _world(), device):
        raise LoadError(
            f"the model's process group has no backend for {device.type}: initialize it with one, as in "
            f'init_process_group("cpu:gloo,cuda:nccl")'
        )
    return LoadedModel(
        ranks=ranks, known_group=known_group, device=device, meshes=meshes, partial=_partial(held, ranks, meshes)
    )


@without_garbage_collection
def targets_of(held: HeldModel, model: LoadedModel) -> list[Target]:
    """Every parameter and persistent buffer, in the order of the model, FSDP1's units first."""
    if lost := held.unused(but_followed=True):
        raise LoadError(
            f"FSDP2 does not compute with what the model has as {some(lost)}: another parameter was assigned after "
            "the first forward, and the next one puts the former back. Copy values into the one that FSDP2 has instead"
        )
    layouts, rank = Layouts(model.ranks, model.meshes), dist.get_rank()
    targets = [target for unit in held.fsdp1_units for target in _of_unit(unit, model)]
    targets += [_of_tensor(tensor, layouts.of(tensor.tensor), rank, model.device) for tensor in held.tensors()]
    return targets


def plan(targets: Sequence[Target], settings: str) -> list[str]:
    """A line for each target and one for the settings: what all ranks must have alike."""
    return [settings, *(f"{' = '.join(t.names)}: {list(t.shape)} {t.dtype} {t.layout}" for t in targets)]


def comparison_of(held: HeldModel, model: LoadedModel) -> Comparison:
    """Of what a load cannot write as it should; what are to be copies it makes alike."""
    return Comparison(read_groups(held), shards_of(held), model.device, compares=["plain"])


def settle(model: nn.Module, held: HeldModel, device: torch.device) -> None:
    """Waits for copies from and to the shards, on any stream, and lets go of what is unsharded.

    What a forward without a backward left unsharded would be used again, with the values of before.
    """
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for unit in held.fsdp1_units:
        unit.reshard()
        unit.unite_memories()


@torch.no_grad()
def write_other_memories(held: HeldModel) -> None:
    """Copies what was loaded to where else FSDP1 has a shard: on another device than the flat parameter.

    The forward under mixed precision reads it there, and the next reshard returns to it.
    """
    for unit in held.fsdp1_units:
        loaded, *others = unit.memories
        for other in others:
            other.copy_(loaded)


def _meshes(held: HeldModel) -> list[DeviceMesh]:
    """Each once."""
    meshes = (tensor.tensor.device_mesh for tensor in held.parameters if isinstance(tensor.tensor, DTensor))
    return list({id(mesh): mesh for mesh in meshes}.values())


def _partial(held: HeldModel, ranks: tuple[int, ...], meshes: tuple[DeviceMesh, ...]) -> tuple[str, ...]:
    is_over_all = {
        id(mesh): over_all_ranks(mesh, (Replicate(),) * mesh.ndim, meshes) is not None for mesh in _meshes(held)
    }
    tensors = ((one.names[0], one.tensor) for one in held.parameters)
    names = [name for name, one in tensors if isinstance(one, DTensor) and not is_over_all[id(one.device_mesh)]]
    return (*names, *(unit.flat_name for unit in held.fsdp1_units if _ranks_of_unit(unit) != ranks))


def _ranks_of_parts(held: HeldModel) -> list[tuple[int, ...]]:
    return [*map(mesh_ranks, _meshes(held)), *map(_ranks_of_unit, held.fsdp1_units)]


def _ranks_of_unit(unit: Fsdp1Unit) -> tuple[int, ...]:
    if unit.replica_group is not None:
        return tuple(range(dist.get_world_size()))
    return tuple(dist.get_process_group_ranks(unit.group))


def _known_group(held: HeldModel, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    groups = [mesh.get_group() for mesh in _meshes(held) if mesh.ndim == 1]
    groups += [*(unit.group for unit in held.fsdp1_units), _world()]
    return next((group for group in groups if sorted(dist.get_process_group_ranks(group)) == sorted(ranks)), None)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@functools.lru_cache(maxsize=1)
def _new_group(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Once for all loads in the same world. A rank that fails here is waited for as long as the group would."""
    made: dist.ProcessGroup = dist.new_group(list(ranks), timeout=_PATIENCE, use_local_synchronization=True)
    return made


def _compute_device(held: HeldModel) -> torch.device:
    for tensor in held.parameters:
        if isinstance(tensor.tensor, DTensor):
            return device_of(tensor.tensor.device_mesh.device_type)
    return held.fsdp1_units[0].compute_device


def home(held: HeldTensor, compute_device: torch.device) -> torch.device:
    """Where a parameter or buffer is in training: a DTensor under CPUOffloadPolicy on the CPU."""
    offloaded = held.unit is not None and isinstance(held.unit.policy, CPUOffloadPolicy)
    return torch.device("cpu") if offloaded and isinstance(held.tensor, DTensor) else compute_device


def _of_tensor(held: HeldTensor, layout: Layout, rank: int, compute_device: torch.device) -> Target:
    tensor, unit = held.tensor, held.unit
    device = home(held, compute_device)
    local = private.local_tensor(tensor)
    if local.numel() != layout.part(tensor.shape, rank).shape.numel():
        raise LoadError(
            f"{held.names[0]}: this rank holds {local.numel()} elements, which is not what {layout} gives it"
        )
    if any(length > 1 and not stride for length, stride in zip(local.shape, local.stride(), strict=True)):
        raise LoadError(f"{held.names[0]} is expanded: several of its elements share memory; clone it before the load")

    def shard() -> torch.Tensor:
        if private.local_tensor(tensor).is_meta:
            materialize(tensor, device)
            if unit is not None and isinstance(tensor, nn.Parameter):
                unit.follow_materialized(tensor)
        return private.local_tensor(tensor).detach()

    return Target(names=held.names, shape=tensor.shape, dtype=tensor.dtype, layout=layout, shard=shard)


def _of_unit(unit: Fsdp1Unit, model: LoadedModel) -> Iterator[Target]:
    if unit.is_summoned:
        raise LoadError("the model is inside of summon_full_params, which would write over what is loaded")
    flat = unit.shard
    if flat.is_meta:
        raise LoadError(f"{unit.flat_name} is on the meta device, where FSDP1 cannot be loaded into")
    if unit.is_recast:
        raise LoadError(
            f"{unit.flat_name} was cast after the first forward, and FSDP1 keeps it in two dtypes: cast it back"
        )
    shards = ShardsOfUnit(unit, model.first)
    for names, place in zip(unit.names, unit.layout(), strict=True):
        layout = InFlatParameter(shards, place.offset, place.stride)
        shard = functools.partial(_part_of_unit, unit, layout.place(place.shape))
        yield Target(names=names, shape=place.shape, dtype=flat.dtype, layout=layout, shard=shard)


def _part_of_unit(unit: Fsdp1Unit, place: Slices) -> torch.Tensor:
    """Where it lies once the unit's memories are one."""
    return unit.memories[0][place]
