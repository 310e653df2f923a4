"""This rank's shard of every tensor, and its place in the whole: nothing is communicated, nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from typing_extensions import assert_never

from fsdp_doctor.extract.sources import FlatUnit, Placed, Plain, Rows, Source, TensorSpec
from fsdp_doctor.fsdp.shards import HeldPart, held_part


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardPlace:
    """Where a shard lies in the whole tensor.

    numel: how many elements it has; a rank may have none of a tensor.
    offset: the number of its first element in the flattened tensor, where its elements follow one another there; None
        for one that was cut along another dim than the first.
    stride: of the flattened tensor. It is row-major, but for an FSDP1 parameter that was not contiguous when it was
        wrapped: then the offset counts along ``tensor.as_strided(shape, stride)``.
    mesh, placements: of the DTensor; None for FSDP1's flat shards and for what is whole on every rank.
    group: over which FSDP1 divides it; None for a DTensor and for what is whole on every rank.
    """

    numel: int
    offset: int | None
    stride: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] | None = None
    group: dist.ProcessGroup | None = None

    def held_part(self, shape: Sequence[int]) -> HeldPart:
        """Which indices of each dim the shard has. Of a DTensor's shard alone."""
        assert self.mesh is not None
        assert self.placements is not None
        return held_part(dist.get_rank(), shape, self.mesh.mesh, self.placements)

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """What the shard holds of a full tensor: in the shard's own shape for a DTensor's, else 1-D."""
        if self.mesh is not None:
            return self.held_part(full.shape).read(full)
        assert self.offset is not None
        order = sorted(range(full.ndim), key=lambda dim: (-self.stride[dim], dim))
        return full.permute(order).reshape(-1)[self.offset : self.offset + self.numel]


@dataclass(slots=True, eq=False, kw_only=True)
class OwnShard:
    """local: as it lies, 1-D, in the order of the place. shape: in which it is handed out."""

    spec: TensorSpec
    local: torch.Tensor
    shape: torch.Size
    place: ShardPlace


def own_shards(sources: Sequence[Source], shards: Sequence[torch.Tensor]) -> Iterator[OwnShard]:
    """In the order of the sources. A rank that holds nothing of a tensor has a shard without elements.

    shards: what this rank holds, by the places of the sources.
    """
    for source in sources:
        local = shards[source.place].detach()
        match source:
            case Plain():
                yield _whole(source, local)
            case Rows():
                yield _rows(source, local.reshape(-1))
            case Placed():
                yield _placed(source, local)
            case FlatUnit():
                yield from _of_unit(source, local)
            case _:
                assert_never(source)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of that shape."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _whole(source: Plain, local: torch.Tensor) -> OwnShard:
    spec = source.spec
    if (part := source.part) is not None:
        local = local.as_strided(part.shape, part.stride, local.storage_offset() + part.offset)
    place = ShardPlace(numel=spec.numel, offset=0, stride=row_major(spec.shape))
    return OwnShard(spec=spec, local=local.reshape(-1), shape=spec.shape, place=place)


def _rows(source: Rows, local: torch.Tensor) -> OwnShard:
    spec = source.spec
    place = ShardPlace(
        numel=local.numel(),
        offset=min(source.shard_group.rank * source.chunk, spec.numel),
        stride=row_major(spec.shape),
        mesh=source.mesh,
        placements=tuple(source.placements),
    )
    # A row may have no elements.
    rows = local.numel() * spec.shape[0] // spec.numel if spec.numel else place.held_part(spec.shape).shape[0]
    return OwnShard(spec=spec, local=local, shape=torch.Size((rows, *spec.shape[1:])), place=place)


def _placed(source: Placed, local: torch.Tensor) -> OwnShard:
    place = ShardPlace(
        numel=local.numel(),
        offset=None,
        stride=row_major(source.spec.shape),
        mesh=source.mesh,
        placements=tuple(source.placements),
    )
    held = place.held_part(source.spec.shape).shape
    if held.numel() != local.numel():
        raise RuntimeError(
            f"{source.spec.names[0]}: this rank holds {local.numel()} elements where "
            f"{source.placements} gives it {held.numel()}"
        )
    return OwnShard(spec=source.spec, local=local.reshape(-1), shape=held, place=place)


def _of_unit(unit: FlatUnit, local: torch.Tensor) -> Iterator[OwnShard]:
    begin = unit.shard_group.rank * unit.chunk
    end = begin + unit.chunk
    for span in unit.spans:
        first = min(max(span.offset, begin), end)
        last = max(min(span.offset + span.spec.numel, end), first)
        part = local[first - begin : last - begin]
        offset = min(max(first - span.offset, 0), span.spec.numel)
        place = ShardPlace(numel=part.numel(), offset=offset, stride=span.stride, group=unit.shard_group.group)
        yield OwnShard(spec=span.spec, local=part, shape=part.shape, place=place)
