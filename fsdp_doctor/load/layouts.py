"""How a tensor is divided over the ranks, and by which way each rank's part comes to it from rank 0."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fsdp_doctor.fsdp.reader import Fsdp1Unit
from fsdp_doctor.fsdp.shards import HeldPart, Slices, Stretches, held_part
from fsdp_doctor.load.outcome import LoadError


@dataclass(frozen=True)
class Replicas:
    """Ranks that hold the same part.

    group: None for all that the model is on. source: the one that has it first, from which the others get it.
    """

    group: dist.ProcessGroup | None
    source: int


class Layout(ABC):
    """How one tensor, or many of one kind, are divided.

    owners: the ranks that get their parts from rank 0 itself, as far as this rank is one of them or is rank 0.
    replicas: the groups, one after the other, in which the parts are then passed on.
    """

    owners: tuple[int, ...]
    replicas: tuple[Replicas, ...]

    @abstractmethod
    def __str__(self) -> str:
        """In words: alike on every rank."""

    @abstractmethod
    def part(self, shape: torch.Size, rank: int) -> HeldPart:
        """What a rank holds of a tensor of that shape, as ``arranged`` has it."""

    def arranged(self, full: torch.Tensor) -> torch.Tensor:
        """The full tensor in the order in which it is divided: a view."""
        return full

    def stretches(self, shape: torch.Size, part: HeldPart) -> list[Stretches] | None:
        """What the part has of the flattened tensor; None where rows are not in order."""
        return [some for some in part.stretches(shape) if some.length and some.rows]


class OnMesh(Layout):
    """A DTensor's. Raises LoadError for a mesh on which torch's own parts do not agree who has which shard."""

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        self._ranks = mesh.mesh
        if any(not _ascend(self._ranks, dim) for dim, one in enumerate(placements) if not isinstance(one, Replicate)):
            raise LoadError(
                f"the mesh {self._ranks.tolist()} has its ranks in another order than their process group, by which "
                "FSDP2 divides, while DTensor divides by the mesh: give it ranks in ascending order"
            )
        self._placements = tuple(placements)
        self._known: dict[tuple[torch.Size, int], HeldPart] = {}
        self._stretches: dict[tuple[torch.Size, HeldPart], list[Stretches] | None] = {}
        copied = [dim for dim, placement in enumerate(placements) if isinstance(placement, Replicate)]
        firsts = tuple(slice(1) if dim in copied else slice(None) for dim in range(mesh.ndim))
        self.owners = tuple(self._ranks[firsts].flatten().tolist())
        here = mesh.get_coordinate() or [0] * mesh.ndim
        self.replicas = tuple(
            Replicas(mesh.get_group(dim), int(self._ranks[(*here[:dim], 0, *here[dim + 1 :])]))
            for dim in copied
            if mesh.size(dim) > 1 and not any(here[later] for later in copied if later > dim)
        )

    def __str__(self) -> str:
        return f"{list(self._placements)} over {list(self._ranks.shape)} ranks"

    def part(self, shape: torch.Size, rank: int) -> HeldPart:
        key = shape, rank
        if key not in self._known:
            self._known[key] = held_part(rank, shape, self._ranks, self._placements)
        return self._known[key]

    def stretches(self, shape: torch.Size, part: HeldPart) -> list[Stretches] | None:
        key = shape, part
        if key not in self._stretches:
            self._stretches[key] = super().stretches(shape, part)
        return self._stretches[key]


class Whole(Layout):
    """Of a tensor that every rank has: a buffer, or a parameter that is not sharded."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.owners = ranks[:1]
        self.replicas = (Replicas(None, ranks[0]),) if len(ranks) > 1 else ()

    def __str__(self) -> str:
        return "whole"

    def part(self, shape: torch.Size, rank: int) -> HeldPart:
        return HeldPart(tuple((range(length),) for length in shape))


class Layouts:
    """Of all tensors of a model that are in no flat parameter: it has few layouts, and a mesh is slow to ask.

    meshes: of the model, those that have all of its ranks.
    """

    def __init__(self, ranks: tuple[int, ...], meshes: Sequence[DeviceMesh]) -> None:
        self._whole = Whole(ranks)
        self._meshes = meshes
        self._on_meshes: dict[tuple[int, tuple[Placement, ...]], OnMesh] = {}

    def of(self, tensor: torch.Tensor) -> Layout:
        if not isinstance(tensor, DTensor):
            return self._whole
        key = id(tensor.device_mesh), tensor.placements
        if key not in self._on_meshes:
            mesh, placements = tensor.device_mesh, tensor.placements
            self._on_meshes[key] = OnMesh(*(over_all_ranks(mesh, placements, self._meshes) or (mesh, placements)))
        return self._on_meshes[key]


class ShardsOfUnit:
    """How the flat parameter of one FSDP1 unit is divided. length: of each shard. own: which this rank has."""

    def __init__(self, unit: Fsdp1Unit, first: int) -> None:
        self.length = unit.shard.numel()
        ranks = tuple(dist.get_process_group_ranks(unit.group))
        self.places = {rank: place if unit.is_sharded else 0 for place, rank in enumerate(ranks)}
        self.own = self.places[dist.get_rank()]
        self.owners = () if first not in ranks else ranks if unit.is_sharded else (first,)
        copied = unit.replica_group or (None if unit.is_sharded else unit.group)
        self.replicas: tuple[Replicas, ...] = ()
        if copied is not None and dist.get_world_size(copied) > 1:
            self.replicas = (Replicas(copied, dist.get_global_rank(copied, 0)),)


class InFlatParameter(Layout):
    """Of one parameter in an FSDP1 unit: each rank holds a range of it, in the order in which its memory lies.

    offset: where it begins in the flat parameter. stride: of the full tensor.
    """

    def __init__(self, shards: ShardsOfUnit, offset: int, stride: tuple[int, ...]) -> None:
        self._shards, self._offset, self._stride = shards, offset, stride
        self.owners, self.replicas = shards.owners, shards.replicas

    def __str__(self) -> str:
        return f"from {self._offset} on in a flat parameter of shards of {self._shards.length}"

    def part(self, shape: torch.Size, rank: int) -> HeldPart:
        length, numel = self._shards.length, math.prod(shape)
        begin = self._shards.places[rank] * length - self._offset
        return HeldPart(((range(min(max(begin, 0), numel), min(max(begin + length, 0), numel)),),))

    def place(self, shape: torch.Size) -> Slices:
        """Where this rank's part lies in its shard."""
        (own,) = self.part(shape, dist.get_rank()).runs[0]
        begin = own.start + self._offset - self._shards.own * self._shards.length if len(own) else 0
        return (slice(begin, begin + len(own)),)

    def arranged(self, full: torch.Tensor) -> torch.Tensor:
        order = sorted(range(full.ndim), key=lambda dim: -self._stride[dim])
        return full.permute(order).reshape(-1)

    def stretches(self, shape: torch.Size, part: HeldPart) -> list[Stretches] | None:
        if list(self._stride) != sorted(self._stride, reverse=True):
            return None
        return super().stretches(torch.Size([shape.numel()]), part)


def _ascend(ranks: torch.Tensor, dim: int) -> bool:
    return ranks.shape[dim] < 2 or bool((ranks.diff(dim=dim) > 0).all())


def over_all_ranks(
    mesh: DeviceMesh, placements: Sequence[Placement], meshes: Sequence[DeviceMesh]
) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """The same division over one of ``meshes``: the one that it is over already, or one of which that is a submesh.

    Over the dims that the submesh lacks it is replicated: each of its neighbours there has a submesh with the same
    shards. None where it is over no part of any of them.
    """
    for whole in meshes:
        here = whole.get_coordinate() or [0] * whole.ndim
        for dims in itertools.combinations(range(whole.ndim), mesh.ndim):
            index = tuple(slice(None) if dim in dims else here[dim] for dim in range(whole.ndim))
            if torch.equal(whole.mesh[index], mesh.mesh):
                of_dim = dict(zip(dims, placements, strict=True))
                return whole, tuple(of_dim.get(dim, Replicate()) for dim in range(whole.ndim))
    return None


def mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())
