"""Layouts of tensors over ranks: which part each rank holds, and which ranks pass parts on to others."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fsdp_doctor.weights.fsdp.expert_groups import extend_mesh
from fsdp_doctor.weights.fsdp.reader import Fsdp1Unit
from fsdp_doctor.weights.fsdp.shards import LocalPart, Slices, Stretches, compute_part
from fsdp_doctor.weights.fsdp.strides import compute_row_major_strides
from fsdp_doctor.weights.load.outcome import LoadError
from fsdp_doctor.weights.names.views import Box, TensorView, find_box


@dataclass(frozen=True)
class Replicas:
    """Ranks that hold the same part.

    group: the process group of the ranks; None for all ranks of the model.
    source: the rank that gets the part first.
    """

    group: dist.ProcessGroup | None
    source: int


class Layout(ABC):
    """Division of a tensor, or of many tensors that are divided alike, over the ranks.

    owners: the ranks that get their parts directly from rank 0. Only rank 0 and the owners are sure to have the same
        list.
    replicas: the groups in which the parts are passed on afterwards, one group after the other.
    """

    owners: tuple[int, ...]
    replicas: tuple[Replicas, ...]

    @abstractmethod
    def __str__(self) -> str:
        """Returns a description that is the same on every rank."""

    @abstractmethod
    def compute_part(self, shape: torch.Size, rank: int) -> LocalPart:
        """Computes the part that a rank holds of a full tensor of ``shape``.

        The part's indices are indices of the tensor that ``arrange`` returns.
        """

    def arrange(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the full tensor with its elements in the order in which they are divided over the ranks."""
        return full

    def list_stretches(self, shape: torch.Size, part: LocalPart) -> list[Stretches] | None:
        """Lists where the part's elements are in the flattened tensor; None if the shard's elements have another order
        than the tensor's.
        """
        return [stretch for stretch in part.list_stretches(shape) if stretch.length and stretch.rows]

    def cut(self, shape: torch.Size, view: TensorView) -> tuple[Layout, LocalPart, Slices] | None:
        """Returns, for a view of a tensor of ``shape``, (its layout, this rank's part of the tensor, slices of this
        part).

        The slices select the elements of the view. Returns None if this rank's elements of the view cannot be described
        by ranges.
        """
        box = find_box(view, shape)
        if box is None:
            return None
        part = self.compute_part(shape, dist.get_rank())
        return _InBox(self, shape, box), part, box.cut(part)[1]


class _InBox(Layout):
    """Layout of a box (a range of indices in each dim) of a tensor that is divided along its dims.

    shape: the shape of the whole tensor.
    """

    def __init__(self, whole: Layout, shape: torch.Size, box: Box) -> None:
        self._whole, self._shape, self._box = whole, shape, box
        self.owners, self.replicas = whole.owners, whole.replicas

    def __str__(self) -> str:
        return f"{self._box} of {self._whole}"

    def compute_part(self, shape: torch.Size, rank: int) -> LocalPart:
        return self._box.cut(self._whole.compute_part(self._shape, rank))[0]

    def arrange(self, full: torch.Tensor) -> torch.Tensor:
        return self._box.arrange(full)

    def list_stretches(self, shape: torch.Size, part: LocalPart) -> list[Stretches] | None:
        return super().list_stretches(torch.Size(self._box.lengths), part) if self._box.is_in_order else None


class OnMesh(Layout):
    """Layout of a DTensor.

    Raises LoadError for a mesh on which FSDP2 and DTensor disagree about which rank has which shard.
    """

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        self._ranks = mesh.mesh
        if any(not _ascend(self._ranks, dim) for dim, p in enumerate(placements) if not isinstance(p, Replicate)):
            raise LoadError(
                f"the mesh {self._ranks.tolist()} has its ranks in another order than their process group: FSDP2 "
                "shards by the group, but DTensor by the mesh. Give the mesh ranks in ascending order"
            )
        self._placements = tuple(placements)
        self._parts: dict[tuple[torch.Size, int], LocalPart] = {}
        self._stretches: dict[tuple[torch.Size, LocalPart], list[Stretches] | None] = {}
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

    def compute_part(self, shape: torch.Size, rank: int) -> LocalPart:
        key = shape, rank
        if key not in self._parts:
            self._parts[key] = compute_part(rank, shape, self._ranks, self._placements)
        return self._parts[key]

    def list_stretches(self, shape: torch.Size, part: LocalPart) -> list[Stretches] | None:
        key = shape, part
        if key not in self._stretches:
            self._stretches[key] = super().list_stretches(shape, part)
        return self._stretches[key]


class Whole(Layout):
    """Layout of a tensor that every rank has: a buffer, or a parameter that is not sharded."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.owners = ranks[:1]
        self.replicas = (Replicas(None, ranks[0]),) if len(ranks) > 1 else ()

    def __str__(self) -> str:
        return "whole"

    def compute_part(self, shape: torch.Size, rank: int) -> LocalPart:
        return LocalPart(tuple((range(length),) for length in shape))


class Layouts:
    """Layouts of a model's tensors; each is made once, since there are few and reading a mesh is slow.

    meshes: the meshes that have all ranks.
    """

    def __init__(self, ranks: tuple[int, ...], meshes: Sequence[DeviceMesh]) -> None:
        self._whole = Whole(ranks)
        self._meshes = meshes
        self._on_meshes: dict[tuple[int, tuple[Placement, ...]], OnMesh] = {}

    def choose(self, tensor: torch.Tensor) -> Layout:
        if not isinstance(tensor, DTensor):
            return self._whole
        key = id(tensor.device_mesh), tensor.placements
        if key not in self._on_meshes:
            mesh, placements = tensor.device_mesh, tensor.placements
            self._on_meshes[key] = OnMesh(*(extend_mesh(mesh, placements, self._meshes) or (mesh, placements)))
        return self._on_meshes[key]


class ShardsOfUnit:
    """Division of the flat parameter of one FSDP1 unit.

    length: the number of elements of each shard.
    places: for each rank, the index of its shard.
    """

    def __init__(self, unit: Fsdp1Unit, first: int) -> None:
        self.length = unit.shard.numel()
        ranks = tuple(dist.get_process_group_ranks(unit.group))
        self.places = {rank: place if unit.is_sharded else 0 for place, rank in enumerate(ranks)}
        self.owners = () if first not in ranks else ranks if unit.is_sharded else (first,)
        copied = unit.replica_group or (None if unit.is_sharded else unit.group)
        self.replicas: tuple[Replicas, ...] = ()
        if copied is not None and dist.get_world_size(copied) > 1:
            self.replicas = (Replicas(copied, dist.get_global_rank(copied, 0)),)


class InFlatParameter(Layout):
    """Layout of one parameter in an FSDP1 unit: each rank holds a range of the parameter, in the order of the
    parameter's memory.

    offset: the index of the parameter's first element in the flat parameter.
    stride: the strides of the full tensor.
    """

    def __init__(self, shards: ShardsOfUnit, offset: int, stride: tuple[int, ...]) -> None:
        self._shards, self._offset, self.stride = shards, offset, stride
        self.owners, self.replicas = shards.owners, shards.replicas

    def __str__(self) -> str:
        return f"from {self._offset} on in a flat parameter of shards of {self._shards.length}"

    def compute_part(self, shape: torch.Size, rank: int) -> LocalPart:
        length, numel = self._shards.length, math.prod(shape)
        begin = self._shards.places[rank] * length - self._offset
        return LocalPart(((range(min(max(begin, 0), numel), min(max(begin + length, 0), numel)),),))

    def find_slices(self, shape: torch.Size) -> Slices:
        """Returns the slice of this rank's shard that holds the rank's part of the parameter."""
        rank = dist.get_rank()
        (run,) = self.compute_part(shape, rank).runs[0]
        begin = run.start + self._offset - self._shards.places[rank] * self._shards.length if len(run) else 0
        return (slice(begin, begin + len(run)),)

    def arrange(self, full: torch.Tensor) -> torch.Tensor:
        order = sorted(range(full.ndim), key=lambda dim: -self.stride[dim])
        return full.permute(order).reshape(-1)

    def list_stretches(self, shape: torch.Size, part: LocalPart) -> list[Stretches] | None:
        return super().list_stretches(torch.Size([shape.numel()]), part) if self._is_row_major else None

    def cut(self, shape: torch.Size, view: TensorView) -> tuple[Layout, LocalPart, Slices] | None:
        if not (view.is_contiguous and self._is_row_major):
            return None
        layout = InFlatParameter(self._shards, self._offset + view.offset, compute_row_major_strides(view.shape))
        (whole,), (part,) = self.find_slices(shape), layout.find_slices(torch.Size(view.shape))
        begin = part.start - whole.start if part.stop > part.start else 0
        return layout, self.compute_part(shape, dist.get_rank()), (slice(begin, begin + part.stop - part.start),)

    @property
    def _is_row_major(self) -> bool:
        return list(self.stride) == sorted(self.stride, reverse=True)


def _ascend(ranks: torch.Tensor, dim: int) -> bool:
    return ranks.shape[dim] < 2 or bool((ranks.diff(dim=dim) > 0).all())


def list_mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())
