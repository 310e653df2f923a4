"""How tensors are gathered: each transfer allocates its outputs, loads this rank's part and takes part in a collective.

Outputs are allocated while the caller's stream is current, so that memory which the caller lets go of
is used again in the order of its stream, whatever the host has run ahead of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_doctor.extract.dtypes import OutputDtypes
from fsdp_doctor.extract.loader import Piece
from fsdp_doctor.extract.lora import Delta
from fsdp_doctor.extract.sources import FlatUnit, Placed, Plain, Rows, ShardGroup, TensorSpec
from fsdp_doctor.fsdp import private


@dataclass(frozen=True)
class Gather:
    """One all-gather. ``input`` may be this rank's part of ``output``."""

    output: torch.Tensor
    input: torch.Tensor


class TensorTransfer(ABC):
    """What one bucket does with some of the model's tensors.

    order: where its first tensor comes among all. nbytes: the device memory that it takes at most.
    shard_group: None where nothing is communicated.
    """

    order: int
    nbytes: int
    shard_group: ShardGroup | None

    @abstractmethod
    def names(self) -> Iterable[str]:
        """The first name of each tensor of which it has a part."""

    @abstractmethod
    def allocate(self, device: torch.device) -> None:
        """On the caller's stream."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """What is to be loaded of this rank's part, and where."""

    def gathers(self) -> list[Gather]:
        """On the gathering stream, as part of one collective of the bucket."""
        return []

    def collect(self, deltas: Mapping[str, list[Delta]]) -> None:  # noqa: B027, most have nothing to do
        """On the gathering stream, after the bucket's collective; with collectives of its own."""

    @abstractmethod
    def results(self) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        """(order, spec, full tensor), on the caller's stream, once it has waited for the gather.

        The transfer holds none of them any more.
        """


class LocalCopy(TensorTransfer):
    """A tensor that is whole on every rank."""

    shard_group = None

    def __init__(self, order: int, source: Plain, dtype: torch.dtype) -> None:
        self.order, self._source, self._dtype = order, source, dtype
        self.nbytes = source.spec.numel * dtype.itemsize

    def names(self) -> Iterable[str]:
        return self._source.spec.names[:1]

    def allocate(self, device: torch.device) -> None:
        self._full = torch.empty(self._source.spec.shape, dtype=self._dtype, device=device)

    def pieces(self) -> Iterator[Piece]:
        source = self._source
        yield Piece(self._full.view(-1), source.local.reshape(-1), source.spec.names[0], 0)

    def results(self) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        full = self.__dict__.pop("_full")
        yield self.order, self._source.spec, full


class InPlaceGather(TensorTransfer):
    """A large tensor sharded by rows: gathered in place, this rank's part being loaded where it belongs."""

    def __init__(self, order: int, source: Rows, dtype: torch.dtype) -> None:
        self.order, self._source, self._dtype = order, source, dtype
        self.shard_group: ShardGroup = source.shard_group
        self.nbytes = source.chunk * source.shard_group.size * dtype.itemsize

    def names(self) -> Iterable[str]:
        return self._source.spec.names[:1]

    def allocate(self, device: torch.device) -> None:
        source = self._source
        self._padded = torch.empty(source.chunk * source.shard_group.size, dtype=self._dtype, device=device)

    def pieces(self) -> Iterator[Piece]:
        local, start = self._source.local(), self.shard_group.rank * self._source.chunk
        yield Piece(self._padded[start : start + local.numel()], local, self._source.spec.names[0], start)

    def gathers(self) -> list[Gather]:
        start = self.shard_group.rank * self._source.chunk
        return [Gather(self._padded, self._padded[start : start + self._source.chunk])]

    def results(self) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        padded = self.__dict__.pop("_padded")
        spec = self._source.spec
        yield self.order, spec, padded[: spec.numel].view(spec.shape)


class PackedGather(TensorTransfer):
    """Many small tensors sharded by rows, in one all-gather, and a copy out of it in one kernel."""

    def __init__(self, orders: list[int], sources: list[Rows], dtype: torch.dtype) -> None:
        self.order, self._orders, self._sources, self._dtype = orders[0], orders, sources, dtype
        self.shard_group: ShardGroup = sources[0].shard_group
        self._chunks = [source.chunk for source in sources]
        self.nbytes = 2 * sum(self._chunks) * self.shard_group.size * dtype.itemsize

    def names(self) -> Iterable[str]:
        return [source.spec.names[0] for source in self._sources]

    def allocate(self, device: torch.device) -> None:
        self._rows = torch.empty(self.shard_group.size, sum(self._chunks), dtype=self._dtype, device=device)
        self._outputs = [
            torch.empty(self.shard_group.size, chunk, dtype=self._dtype, device=device) for chunk in self._chunks
        ]

    def pieces(self) -> Iterator[Piece]:
        places = self._rows[self.shard_group.rank].split(self._chunks)
        for place, source in zip(places, self._sources, strict=True):
            local = source.local()
            target = place if local.numel() == source.chunk else place[: local.numel()]
            yield Piece(target, local, source.spec.names[0], self.shard_group.rank * source.chunk)

    def gathers(self) -> list[Gather]:
        return [Gather(self._rows.view(-1), self._rows[self.shard_group.rank])]

    def results(self) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        outputs = self.__dict__.pop("_outputs")
        torch.split_with_sizes_copy(self.__dict__.pop("_rows"), self._chunks, dim=1, out=outputs)
        for order, source, output in zip(self._orders, self._sources, outputs, strict=True):
            spec = source.spec
            padded = output if output.numel() == spec.numel else output.view(-1)[: spec.numel]
            yield order, spec, padded.view(spec.shape)


@dataclass(frozen=True)
class _Segment:
    """A part of one span: ``numel`` elements from ``start`` of it, which one rank holds.

    source: where they begin in that rank's shard. offset: where they begin in its row.
    """

    index: int
    start: int
    numel: int
    rank: int
    source: int
    offset: int


class UnitOutputs:
    """The full tensors of an FSDP1 unit, which one gather or several fill part by part."""

    def __init__(self, order: int, source: FlatUnit, dtypes: OutputDtypes) -> None:
        self.order, self.source = order, source
        self.dtypes = [dtypes.of(span.spec) for span in source.spans]
        self._missing = [span.spec.numel for span in source.spans]
        self._flat: dict[int, torch.Tensor] = {}
        self._begun: set[int] = set()

    def nbytes(self, index: int) -> int:
        return self.source.spans[index].spec.numel * self.dtypes[index].itemsize

    def held_bytes(self) -> int:
        """Device memory of the tensors that have been gathered in part."""
        return sum(map(self.nbytes, self._begun))

    def flat(self, index: int, device: torch.device) -> torch.Tensor:
        """The tensor's memory, 1-D, in the order in which it lies in the flat parameter."""
        if index not in self._flat:
            numel = self.source.spans[index].spec.numel
            self._flat[index] = torch.empty(numel, dtype=self.dtypes[index], device=device)
        return self._flat[index]

    def add(self, index: int, numel: int) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        """So many elements more have been gathered; yields the tensor once all have."""
        self._missing[index] -= numel
        self._begun.add(index)
        if not self._missing[index]:
            span = self.source.spans[index]
            self._begun.remove(index)
            yield self.order + index, span.spec, self._flat.pop(index).as_strided(span.spec.shape, span.stride)

    def rows(self, dtype: torch.dtype) -> list[list[_Segment]]:
        """What each rank has of the spans that are gathered in that dtype, in the order of its shard."""
        shard = self.source.local.numel()
        rows: list[list[_Segment]] = [[] for _ in range(self.source.shard_group.size)]
        for index, span in enumerate(self.source.spans):
            if self.dtypes[index] != dtype:
                continue
            first, last = span.offset, span.offset + span.spec.numel
            # An empty one at the very end still lies on a rank.
            lowest = min(first // shard, len(rows) - 1)
            for rank in range(lowest, max(-(-last // shard), lowest + 1)):
                begin, end = max(first, rank * shard), min(last, (rank + 1) * shard)
                rows[rank].append(_Segment(index, begin - first, end - begin, rank, begin - rank * shard, 0))
        return rows


def flat_gathers(unit: UnitOutputs, bucket_bytes: int) -> Iterator[FlatGather]:
    """The gathers of one FSDP1 unit, each with its rows and the tensors that it begins within a bucket.

    A unit that fits takes one. Of a larger one each takes from every rank, so that all of their links are busy; but
    no rank begins a tensor that does not fit beside those that have been begun, unless it is the first that has
    something left.
    """
    for dtype in dict.fromkeys(unit.dtypes):
        rows = unit.rows(dtype)
        longest = max(bucket_bytes // (2 * unit.source.shard_group.size * dtype.itemsize), 1)
        missing: dict[int, int] = {}
        while any(rows):
            begun = set(missing)
            first = next(rank for rank, row in enumerate(rows) if row)
            segments: list[_Segment] = []
            for rank, row in enumerate(rows):
                segments += _take(unit, row, longest, missing, bucket_bytes // 2, must_take=rank == first)
            for segment in segments:
                missing[segment.index] -= segment.numel
            opened = sum(map(unit.nbytes, {segment.index for segment in segments} - begun))
            missing = {index: numel for index, numel in missing.items() if numel}
            yield FlatGather(unit, dtype, segments, max(segment.offset + segment.numel for segment in segments), opened)


def _take(
    unit: UnitOutputs, row: list[_Segment], longest: int, missing: dict[int, int], most_bytes: int, *, must_take: bool
) -> list[_Segment]:
    """Takes up to ``longest`` elements off a rank's row; ``missing`` gains the tensors that it begins."""
    taken: list[_Segment] = []
    length = 0
    while row and length < longest:
        segment = row[0]
        if segment.index not in missing:
            held = sum(map(unit.nbytes, missing))
            if held + unit.nbytes(segment.index) > most_bytes and missing and not (must_take and not taken):
                break
            missing[segment.index] = unit.source.spans[segment.index].spec.numel
        numel = min(segment.numel, longest - length)
        taken.append(replace(segment, numel=numel, offset=length))
        length += numel
        if numel == segment.numel:
            row.pop(0)
        else:
            row[0] = replace(
                segment, start=segment.start + numel, numel=segment.numel - numel, source=segment.source + numel
            )
    return taken


class FlatGather(TensorTransfer):
    """A stretch of every rank's shard of an FSDP1 unit, in one all-gather."""

    def __init__(
        self, unit: UnitOutputs, dtype: torch.dtype, segments: list[_Segment], length: int, opened_bytes: int
    ) -> None:
        self.unit = unit
        self._dtype, self._segments, self._length = dtype, segments, length
        self.order = unit.order
        self.shard_group: ShardGroup = unit.source.shard_group
        self.nbytes = length * self.shard_group.size * dtype.itemsize + opened_bytes

    def names(self) -> Iterable[str]:
        spans = self.unit.source.spans
        return dict.fromkeys(spans[segment.index].spec.names[0] for segment in self._segments)

    def allocate(self, device: torch.device) -> None:
        self._rows = torch.empty(self.shard_group.size, self._length, dtype=self._dtype, device=device)
        self._targets = [
            self.unit.flat(segment.index, device)[segment.start : segment.start + segment.numel]
            for segment in self._segments
        ]

    def pieces(self) -> Iterator[Piece]:
        row, source = self._rows[self.shard_group.rank], self.unit.source
        for segment in self._segments:
            if segment.rank == self.shard_group.rank:
                yield Piece(
                    row[segment.offset : segment.offset + segment.numel],
                    source.local[segment.source : segment.source + segment.numel],
                    source.spans[segment.index].spec.names[0],
                    segment.start,
                )

    def gathers(self) -> list[Gather]:
        return [Gather(self._rows.view(-1), self._rows[self.shard_group.rank])]

    def results(self) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        rows, targets = self.__dict__.pop("_rows"), self.__dict__.pop("_targets")
        pieces = [rows[segment.rank, segment.offset : segment.offset + segment.numel] for segment in self._segments]
        private.copy_all(targets, pieces)
        del rows, targets, pieces
        for segment in self._segments:
            yield from self.unit.add(segment.index, segment.numel)


class Redistribution(TensorTransfer):
    """Any other DTensor, by DTensor's own redistribution; what is merged into it is added to the full tensor."""

    def __init__(self, order: int, source: Placed, dtype: torch.dtype) -> None:
        self.order, self._source, self._dtype = order, source, dtype
        self.shard_group: ShardGroup = source.shard_group
        self.nbytes = 4 * source.spec.numel * max(dtype.itemsize, source.spec.dtype.itemsize)

    def names(self) -> Iterable[str]:
        return self._source.spec.names[:1]

    def allocate(self, device: torch.device) -> None:
        local = private.local_tensor(self._source.tensor)
        self._local = torch.empty(local.shape, dtype=local.dtype, device=device)
        self._full = torch.empty(self._source.spec.shape, dtype=self._dtype, device=device)

    def pieces(self) -> Iterator[Piece]:
        yield Piece(self._local.view(-1), private.local_tensor(self._source.tensor).reshape(-1), "", 0)

    def collect(self, deltas: Mapping[str, list[Delta]]) -> None:
        tensor, spec = self._source.tensor, self._source.spec
        merged = deltas.get(spec.names[0], [])
        # Without shape and stride, from_local takes every shard to be as long as this one.
        full = DTensor.from_local(
            self._local if merged else self._local.to(self._dtype),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        ).full_tensor()
        for delta in merged:
            full = full + delta.part(0, spec.numel).view(spec.shape)
        self._full.copy_(full)

    def results(self) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        del self._local
        yield self.order, self._source.spec, self.__dict__.pop("_full")


def all_gather(transfers: list[TensorTransfer]) -> None:
    """One collective for each shard group and dtype of the bucket, in the order of the transfers.

    gloo joins the tensors of a coalesced all-gather as if they had one dtype.
    """
    gathers: dict[tuple[tuple[int, ...], torch.dtype], tuple[dist.ProcessGroup, list[Gather]]] = {}
    for transfer in transfers:
        for gather in transfer.gathers():
            assert transfer.shard_group is not None
            key = transfer.shard_group.ranks, gather.output.dtype
            gathers.setdefault(key, (transfer.shard_group.group, []))[1].append(gather)
    for group, batch in gathers.values():
        private.all_gather(group, [g.output for g in batch], [g.input for g in batch]).wait()
