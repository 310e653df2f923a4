"""Shards of this rank and their places in the whole tensors, without communication or copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from typing_extensions import assert_never

from fsdp_doctor.weights.fsdp.shards import LocalPart, compute_part
from fsdp_doctor.weights.fsdp.strides import compute_row_major_strides
from fsdp_doctor.weights.transport.sources import FlatUnit, Placed, Plain, Rows, Source, TensorSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardPlace:
    """Place of a shard in the whole tensor.

    numel: the number of elements in the shard; 0 if the rank has nothing of the tensor.
    offset: the index of the shard's first element in the flattened tensor, if the shard's elements are consecutive
        there; None for a shard that was cut along another dim than the first.
    stride: the strides of the whole tensor. They are row-major, except for an FSDP1 parameter that was not contiguous
        when it was wrapped: the offset then counts elements in the order of these strides.
    mesh, placements: the mesh and the placements of the DTensor; None for FSDP1's flat shards, for tensors that are
        whole on every rank, and for a part of a fused tensor with a separate name on the Hub.
    group: the group over which FSDP1's flat shard, or a part of a fused tensor, is divided into ranges; None for all
        others.
    part: the rank's indices along each dim, for a part of a fused tensor that is divided along other dims.
    """

    numel: int
    offset: int | None
    stride: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] | None = None
    group: dist.ProcessGroup | None = None
    part: LocalPart | None = None

    def held_part(self, shape: Sequence[int]) -> LocalPart:
        """Returns the indices of each dim that the shard has. Only for a DTensor's shard, or if ``part`` is given."""
        if self.part is not None:
            return self.part
        assert self.mesh is not None
        assert self.placements is not None
        return compute_part(dist.get_rank(), shape, self.mesh.mesh, self.placements)

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the elements of a full tensor that are in the shard: in the shape of a DTensor's shard, otherwise
        1-D.
        """
        if self.mesh is not None or self.part is not None:
            return self.held_part(full.shape).read(full)
        assert self.offset is not None
        order = sorted(range(full.ndim), key=lambda dim: (-self.stride[dim], dim))
        return full.permute(order).reshape(-1)[self.offset : self.offset + self.numel]


@dataclass(slots=True, eq=False, kw_only=True)
class SourceShard:
    """Shard of this rank, read from its present memory.

    local: the elements, 1-D, in the order that ``place`` describes.
    shape: the shape in which the shard is yielded.
    """

    spec: TensorSpec
    local: torch.Tensor
    shape: torch.Size
    place: ShardPlace


def read_own_shards(sources: Sequence[Source], shards: Sequence[torch.Tensor]) -> Iterator[SourceShard]:
    """Reads this rank's shard of each tensor, in the order of the sources; the shard is empty if the rank holds
    nothing.

    shards: this rank's shards, each at the index ``place`` of its source.
    """
    for source in sources:
        local = shards[source.place].detach()
        match source:
            case Plain(spec=spec):
                yield place_whole(spec, source.view_whole(local).reshape(-1))
            case Rows():
                yield place_rows(source, local.reshape(-1))
            case Placed():
                yield place_dtensor(source, local)
            case FlatUnit():
                yield from place_unit(source, local)
            case _:
                assert_never(source)


def place_whole(spec: TensorSpec, local: torch.Tensor) -> SourceShard:
    place = ShardPlace(numel=spec.numel, offset=0, stride=compute_row_major_strides(spec.shape))
    return SourceShard(spec=spec, local=local, shape=spec.shape, place=place)


def _place_on_mesh(source: Rows | Placed, local: torch.Tensor, offset: int | None) -> ShardPlace:
    placements = tuple(source.placements)
    stride = compute_row_major_strides(source.spec.shape)
    return ShardPlace(numel=local.numel(), offset=offset, stride=stride, mesh=source.mesh, placements=placements)


def place_rows(source: Rows, local: torch.Tensor) -> SourceShard:
    spec = source.spec
    place = _place_on_mesh(source, local, min(source.shard_group.rank * source.chunk, spec.numel))
    # A row may have no elements.
    rows = local.numel() * spec.shape[0] // spec.numel if spec.numel else place.held_part(spec.shape).shape[0]
    return SourceShard(spec=spec, local=local, shape=torch.Size((rows, *spec.shape[1:])), place=place)


def place_dtensor(source: Placed, local: torch.Tensor) -> SourceShard:
    place = _place_on_mesh(source, local, None)
    shape = place.held_part(source.spec.shape).shape
    if shape.numel() != local.numel():
        raise RuntimeError(
            f"{source.spec.names[0]}: this rank holds {local.numel()} elements, but {source.placements} gives it "
            f"{shape.numel()}"
        )
    return SourceShard(spec=source.spec, local=local.reshape(-1), shape=shape, place=place)


def place_unit(unit: FlatUnit, local: torch.Tensor) -> Iterator[SourceShard]:
    begin = unit.shard_group.rank * unit.chunk
    end = begin + unit.chunk
    for span in unit.spans:
        first = min(max(span.offset, begin), end)
        last = max(min(span.offset + span.spec.numel, end), first)
        part = local[first - begin : last - begin]
        offset = min(max(first - span.offset, 0), span.spec.numel)
        place = ShardPlace(numel=part.numel(), offset=offset, stride=span.stride, group=unit.shard_group.group)
        yield SourceShard(spec=span.spec, local=part, shape=part.shape, place=place)
