"""Transfers that gather tensors: each allocates its outputs, loads this rank's part and takes part in a collective.

Outputs are allocated while the caller's stream is current. Memory that the caller frees is therefore reused in the
order of the caller's stream, however far the host has run ahead.
"""

from __future__ import annotations

import collections
import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.fsdp.decorators import disable_autograd
from fsdp_doctor.weights.transport.deltas import Delta
from fsdp_doctor.weights.transport.loader import Piece
from fsdp_doctor.weights.transport.shard_places import (
    ShardPlace,
    SourceShard,
    place_dtensor,
    place_rows,
    place_unit,
    place_whole,
)
from fsdp_doctor.weights.transport.sources import (
    FlatUnit,
    OutputDtypes,
    Placed,
    Plain,
    Rows,
    ShardGroup,
    Span,
    TensorSpec,
)

Result: TypeAlias = torch.Tensor | Callable[[], torch.Tensor]
"""A tensor, or a function that copies the tensor out of memory that it shares with other tensors."""
OrderedResult: TypeAlias = tuple[int, TensorSpec, Result]
"""(the tensor's index among all tensors, its source, the full tensor)."""


@dataclass(slots=True, eq=False)
class Gather:
    """All-gather of one tensor. ``input`` may be this rank's part of ``output``."""

    output: torch.Tensor
    input: torch.Tensor


@dataclass(eq=False)
class Call:
    """State of one extraction. The plan, by contrast, is shared by many extractions.

    shards: this rank's shards, each at the index ``place`` of its source.
    ready: the indices of the shards that a collective can read without a copy.
    units: the outputs of FSDP1 units that have been gathered in part, by the position of each unit's first tensor.
    """

    device: torch.device
    shards: Sequence[torch.Tensor]
    ready: frozenset[int]
    units: dict[int, UnitOutputs] = field(default_factory=dict)


class TensorTransfer(ABC):
    """Transfer that gathers some of the model's tensors. The plan keeps it; ``begin`` makes a copy for one call.

    order: the position of the transfer's first tensor among all tensors.
    names: the first name of each tensor that is gathered, in whole or in part.
    nbytes: the peak device memory of the transfer, which includes ``collecting_bytes`` and ``opened_bytes``.
    collecting_bytes: the memory that is needed only during ``collect``.
    opened_bytes: the memory that is needed only once the tensors are copied out of the gathered memory.
    copied_bytes: the memory that is needed in addition to ``nbytes`` while the tensors are yielded.
    shard_group: the group of the collectives; None if nothing is communicated.
    """

    order: int
    names: Sequence[str]
    nbytes: int
    collecting_bytes: int = 0
    opened_bytes: int = 0
    copied_bytes: int = 0
    shard_group: ShardGroup | None
    _gathers: Sequence[Gather] = ()

    def begin(self, call: Call) -> Self:
        """Returns a copy for one call, with its memory allocated on the caller's stream."""
        transfer = copy.copy(self)
        try:
            transfer.allocate(call)
        except BaseException:
            # The error's traceback holds closures, and so what it could allocate.
            vars(transfer).clear()
            raise
        return transfer

    @abstractmethod
    def allocate(self, call: Call) -> None:
        """Allocates all memory that is needed until the collective has been launched."""

    @abstractmethod
    def list_pieces(self) -> Iterable[Piece]:
        """Returns the parts of this rank's shards to load, with their targets."""

    def list_copies(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Lists (targets, sources) of further copies, in addition to the pieces."""
        return (), ()

    def list_gathers(self) -> Sequence[Gather]:
        """Returns the all-gathers that become part of one collective of the bucket."""
        return self._gathers

    def collect(self, deltas: Mapping[str, list[Delta]]) -> None:  # noqa: B027, most have nothing to do
        """Runs further collectives on the gathering stream, after the bucket's all-gathers."""

    def list_staged(self) -> Sequence[torch.Tensor]:
        """Lists the device tensors that hold the shards of :meth:`list_own_shards`; a shard outside of them is a
        copy.
        """
        return [gather.input for gather in self.list_gathers()]

    @abstractmethod
    def list_own_shards(self) -> Iterable[SourceShard]:
        """Yields this rank's part of the tensors as it is gathered: on the device, cast and merged.

        The parts are valid until the results are made.
        """

    @abstractmethod
    def make_results(self) -> Iterable[OrderedResult]:
        """Returns the full tensors, on the caller's stream, which has waited for the gather."""


def launch_all_gathers(transfers: Sequence[TensorTransfer]) -> None:
    """Launches one collective for each shard group and dtype of the bucket, in the order of the transfers.

    Each dtype has a separate collective, because gloo joins the tensors of a coalesced all-gather as if they had one
    dtype.
    """
    gathers: dict[tuple[tuple[int, ...], torch.dtype], tuple[dist.ProcessGroup, list[Gather]]] = {}
    for transfer in transfers:
        for gather in transfer.list_gathers():
            assert transfer.shard_group is not None
            key = transfer.shard_group.ranks, gather.output.dtype
            gathers.setdefault(key, (transfer.shard_group.group, []))[1].append(gather)
    for group, batch in gathers.values():
        outputs, inputs = [_view_as_carried(g.output) for g in batch], [_view_as_carried(g.input) for g in batch]
        private.all_gather(group, outputs, inputs).wait()


def take_results(transfers: list[TensorTransfer]) -> Iterator[OrderedResult]:
    """Yields all results, and releases each transfer after its results."""
    while transfers:
        yield from transfers.pop(0).make_results()


def materialize(result: Result) -> torch.Tensor:
    """Returns the full tensor of a result.

    Call it on the caller's stream. The results of one transfer must be passed in their order.
    """
    return result if isinstance(result, torch.Tensor) else result()


# Dtypes that gloo and NCCL both support; all others (8-bit floats, complex numbers, 16-bit integers) are sent as bytes.
_CARRIED = frozenset(
    {
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.uint8, torch.int8, torch.int32, torch.int64),
    }
)


def _view_as_carried(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a contiguous tensor in a dtype that a collective supports."""
    return tensor if tensor.dtype in _CARRIED else tensor.view(-1).view(torch.uint8)


class LocalCopy(TensorTransfer):
    """Copy of a tensor that is whole on every rank."""

    shard_group = None

    def __init__(self, order: int, source: Plain, dtype: torch.dtype) -> None:
        self.order, self.names, self._source, self._dtype = order, source.spec.names[:1], source, dtype
        self.nbytes = source.spec.numel * dtype.itemsize

    def allocate(self, call: Call) -> None:
        self._local = self._source.view_whole(call.shards[self._source.place])
        self._full = torch.empty(self._source.spec.shape, dtype=self._dtype, device=call.device)

    def list_pieces(self) -> Iterable[Piece]:
        return [Piece(self._full.view(-1), self._local.reshape(-1), self.names[0], 0)]

    def list_staged(self) -> Sequence[torch.Tensor]:
        return [self._full]

    def list_own_shards(self) -> Iterable[SourceShard]:
        return [place_whole(self._source.spec, self._full.view(-1))]

    def make_results(self) -> Iterable[OrderedResult]:
        return [(self.order, self._source.spec, self._full)]


class RowsGather(TensorTransfer):
    """Gather of large row-sharded tensors, each directly into its final memory.

    A shard that needs no load is gathered from its own memory; otherwise it is first loaded into its place in the
    output.
    """

    def __init__(self, orders: list[int], sources: list[Rows], dtype: torch.dtype) -> None:
        self.order, self._orders, self._sources, self._dtype = orders[0], orders, sources, dtype
        self.names = [source.spec.names[0] for source in sources]
        self.shard_group: ShardGroup = sources[0].shard_group
        self.nbytes = sum(source.chunk for source in sources) * self.shard_group.size * dtype.itemsize

    def allocate(self, call: Call) -> None:
        size, rank, dtype = self.shard_group.size, self.shard_group.rank, self._dtype
        self._full: list[torch.Tensor] = []
        self._pieces: list[Piece] = []
        self._gathers: list[Gather] = []
        for source in self._sources:
            spec, chunk, shard = source.spec, source.chunk, call.shards[source.place]
            is_even = spec.numel == chunk * size
            full = torch.empty(spec.shape if is_even else chunk * size, dtype=dtype, device=call.device)
            self._full.append(full)
            if source.place in call.ready:
                self._gathers.append(Gather(full, shard))
                continue
            part = full.view(-1)[rank * chunk : (rank + 1) * chunk]
            target = part if source.held == chunk else part[: source.held]
            self._pieces.append(Piece(target, shard.reshape(-1), spec.names[0], rank * chunk))
            self._gathers.append(Gather(full.view(-1), part))

    def list_pieces(self) -> Iterable[Piece]:
        return self._pieces

    def list_own_shards(self) -> Iterator[SourceShard]:
        for source, gather in zip(self._sources, self._gathers, strict=True):
            yield place_rows(source, gather.input.reshape(-1)[: source.held])

    def make_results(self) -> Iterable[OrderedResult]:
        for order, source, full in zip(self._orders, self._sources, self._full, strict=True):
            spec = source.spec
            yield order, spec, full if full.shape == spec.shape else full[: spec.numel].view(spec.shape)


class PackedGather(TensorTransfer):
    """Gather of many small row-sharded tensors in one all-gather. One kernel copies the tensors out of its result.

    The tensors may lie anywhere in the model, because a separate gather for each bucket would cost the host the same
    time for every bucket.
    """

    def __init__(self, orders: list[int], sources: list[Rows], dtype: torch.dtype) -> None:
        self.order, self.orders, self._sources, self._dtype = orders[0], orders, sources, dtype
        self.names = [source.spec.names[0] for source in sources]
        self.shard_group: ShardGroup = sources[0].shard_group
        self._chunks = [source.chunk for source in sources]
        self._places = frozenset(source.place for source in sources)
        self.nbytes = 2 * sum(self._chunks) * self.shard_group.size * dtype.itemsize

    def allocate(self, call: Call) -> None:
        size, device, dtype = self.shard_group.size, call.device, self._dtype
        self._shards = [call.shards[source.place] for source in self._sources]
        self._rows = torch.empty(size, sum(self._chunks), dtype=dtype, device=device)
        self._outputs = [torch.empty((size, chunk), dtype=dtype, device=device) for chunk in self._chunks]
        self._is_ready = self._places <= call.ready
        self._gathers = [Gather(self._rows.view(-1), self._rows[self.shard_group.rank])]

    def list_copies(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        if not self._is_ready:
            return (), ()
        return private.make_views_like(self._rows[self.shard_group.rank], self._shards), self._shards

    def list_pieces(self) -> Iterator[Piece]:
        if self._is_ready:
            return
        rank = self.shard_group.rank
        targets = self._rows[rank].split(self._chunks)
        for target, source, shard in zip(targets, self._sources, self._shards, strict=True):
            part = target if source.held == source.chunk else target[: source.held]
            yield Piece(part, shard.reshape(-1), source.spec.names[0], rank * source.chunk)

    def list_own_shards(self) -> Iterator[SourceShard]:
        parts = self._rows[self.shard_group.rank].split(self._chunks)
        for source, part in zip(self._sources, parts, strict=True):
            yield place_rows(source, part[: source.held])

    def make_results(self) -> Iterator[OrderedResult]:
        torch.split_with_sizes_copy(self._rows, self._chunks, dim=1, out=self._outputs)
        for order, source, output in zip(self.orders, self._sources, self._outputs, strict=True):
            spec = source.spec
            is_even = output.numel() == spec.numel
            yield order, spec, (output if is_even else output.view(-1)[: spec.numel]).view(spec.shape)


class Redistribution(TensorTransfer):
    """Gather, by DTensor's redistribution, of a DTensor that is not sharded by rows over one group.

    Deltas are added to the full tensor.
    """

    def __init__(self, order: int, source: Placed, dtype: torch.dtype, *, is_merged: bool) -> None:
        self.order, self.names, self._source, self._dtype = order, source.spec.names[:1], source, dtype
        self._is_merged, self._loaded_dtype = is_merged, source.spec.dtype if is_merged else dtype
        self.shard_group: ShardGroup = source.shard_group
        own = source.spec.dtype
        self._num_local = _count_local(source)
        self.collecting_bytes = 3 * source.spec.numel * max(dtype.itemsize, own.itemsize)
        self.nbytes = self.collecting_bytes + source.spec.numel * dtype.itemsize
        self.nbytes += self._num_local * self._loaded_dtype.itemsize

    def allocate(self, call: Call) -> None:
        self._shard = call.shards[self._source.place]
        # The memory is equally large on every rank, so that a bucket frees exactly what the plan counts.
        memory = torch.empty(self._num_local, dtype=self._loaded_dtype, device=call.device)
        self._local = memory[: self._shard.numel()].view(self._shard.shape)
        self._full = torch.empty(self._source.spec.shape, dtype=self._dtype, device=call.device)

    def list_pieces(self) -> Iterable[Piece]:
        return [Piece(self._local.view(-1), self._shard.reshape(-1), "", 0)]

    def collect(self, deltas: Mapping[str, list[Delta]]) -> None:
        spec = self._source.spec
        full = _redistribute(self._local, self._source)
        for delta in deltas.get(spec.names[0], []):
            full = full + delta.compute_part(0, spec.numel).view(spec.shape)
        self._full.copy_(full)

    def list_staged(self) -> Sequence[torch.Tensor]:
        return [] if self._is_merged else [self._local]

    def list_own_shards(self) -> Iterable[SourceShard]:
        shard = place_dtensor(self._source, self._local)
        if self._is_merged:
            shard.local = shard.place.of(self._full).reshape(-1)
        return [shard]

    def make_results(self) -> Iterable[OrderedResult]:
        return [(self.order, self._source.spec, self._full)]


def _count_local(source: Placed) -> int:
    """Counts the elements of the largest shard, which is the first rank's."""
    shape = list(source.spec.shape)
    for placement, size in zip(source.placements, source.mesh.shape, strict=True):
        if (dim := getattr(placement, "dim", None)) is not None:
            shape[dim] = -(-shape[dim] // size)
    return math.prod(shape)


def _redistribute(local: torch.Tensor, source: Placed) -> torch.Tensor:
    """Returns the full tensor of a DTensor.

    A dtype that collectives do not support is sent as bytes, along an additional dim that is not sharded.
    """
    shape, stride, dtype = source.spec.shape, source.stride, local.dtype
    is_carried = dtype in _CARRIED
    if not is_carried:
        local = local.unsqueeze(-1).view(torch.uint8)
        shape, stride = torch.Size((*shape, dtype.itemsize)), (*(step * dtype.itemsize for step in stride), 1)
    # Without shape and stride, from_local takes every shard to be as long as this one.
    full = DTensor.from_local(
        local, source.mesh, source.placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()
    return full if is_carried else full.contiguous().view(dtype).squeeze(-1)


# FSDP1's flat parameters, in stretches of every rank's shard that are copied out to the tensors, or as a whole.

# The alignment of CUDA's allocator in bytes, and the part of a unit that may be wasted when a tensor is not copied out.
_ALIGNMENT = 512
_SMALL_PART = 64


@dataclass(frozen=True)
class _Segment:
    """Segment of a span that one rank holds: ``numel`` elements from the span's element ``start`` on.

    source: the segment's first element in the rank's shard.
    offset: the segment's first element in the rank's row.
    """

    index: int
    start: int
    numel: int
    rank: int
    source: int
    offset: int


class FlatLayout:
    """FSDP1 unit with the dtypes in which its tensors are gathered.

    nbytes: the size of each tensor in bytes.
    names: the first name of each tensor.
    """

    def __init__(self, order: int, source: FlatUnit, dtypes: OutputDtypes) -> None:
        self.order, self.source = order, source
        self.dtypes = [dtypes.choose(span.spec) for span in source.spans]
        self.nbytes = [span.spec.numel * d.itemsize for span, d in zip(source.spans, self.dtypes, strict=True)]
        self.names = [span.spec.names[0] for span in source.spans]

    def list_rows(self, dtype: torch.dtype) -> list[list[_Segment]]:
        """Lists each rank's segments of the spans that are gathered in ``dtype``, in the order of the rank's shard."""
        shard = self.source.chunk
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


class UnitOutputs:
    """Full tensors of an FSDP1 unit, which one or more gathers fill part by part."""

    def __init__(self, unit: FlatLayout) -> None:
        self._unit = unit
        self._missing = [span.spec.numel for span in unit.source.spans]
        self._flat: dict[int, torch.Tensor] = {}
        self._begun: set[int] = set()

    def count_kept_bytes(self) -> int:
        """Counts the bytes of device memory of tensors that have been gathered in part."""
        return sum(self._unit.nbytes[index] for index in self._begun)

    def allocate_flat(self, index: int, device: torch.device) -> torch.Tensor:
        """Returns the tensor's memory, 1-D, in its order in the flat parameter; allocates it at the first call."""
        if index not in self._flat:
            numel = self._unit.source.spans[index].spec.numel
            self._flat[index] = torch.empty(numel, dtype=self._unit.dtypes[index], device=device)
        return self._flat[index]

    def add(self, index: int, numel: int) -> Iterator[OrderedResult]:
        """Counts gathered elements, and yields the tensor once all of its elements have been gathered."""
        self._missing[index] -= numel
        self._begun.add(index)
        if not self._missing[index]:
            span = self._unit.source.spans[index]
            self._begun.remove(index)
            yield self._unit.order + index, span.spec, self._flat.pop(index).as_strided(span.spec.shape, span.stride)


def sum_two_largest(sizes: Sequence[int]) -> int:
    return sum(sorted(sizes)[-2:])


def divide_unit(
    unit: FlatLayout, bucket_bytes: int, most_bytes: int, last_bytes: int, merged: Collection[str]
) -> Iterator[TensorTransfer]:
    """Divides one FSDP1 unit into gathers.

    A unit that fits takes one gather, if at least half of it is requested. Otherwise there are several gathers. The
    rows of each gather, and the tensors that it begins, fit into a bucket. Each gather takes elements from every rank,
    so that all links are busy. No rank begins a tensor that does not fit together with the tensors already begun,
    except the first rank that has anything left.

    most_bytes: the device memory that the unit may take, together with the tensor before it.
    last_bytes: the size of the tensor before the unit.
    merged: the first names of the weights into which adapters are merged.
    """
    if len(set(unit.dtypes)) == 1 and set(merged).isdisjoint(unit.names):
        whole = UnitGather(unit, bucket_bytes // 8)
        if last_bytes + whole.nbytes + whole.copied_bytes <= most_bytes and whole.nbytes <= 2 * sum(unit.nbytes):
            yield whole
            return
    # The memory that is left besides the caller's last tensor and the tensor that the first rank begins is halved: one
    # half for the rows of a gather, one for the tensors that other ranks begin.
    part_bytes = min(bucket_bytes, most_bytes - sum_two_largest((last_bytes, *unit.nbytes))) // 2
    for dtype in dict.fromkeys(unit.dtypes):
        rows = unit.list_rows(dtype)
        longest = max(part_bytes // (unit.source.shard_group.size * dtype.itemsize), 1)
        missing: dict[int, int] = {}
        while any(rows):
            begun = set(missing)
            first = next(rank for rank, row in enumerate(rows) if row)
            segments: list[_Segment] = []
            for rank, row in enumerate(rows):
                segments += _take(unit, row, longest, missing, part_bytes, must_take=rank == first)
            for segment in segments:
                missing[segment.index] -= segment.numel
            missing = {index: numel for index, numel in missing.items() if numel}
            yield FlatGather(unit, dtype, segments, begun)


def _take(
    unit: FlatLayout, row: list[_Segment], longest: int, missing: dict[int, int], most_bytes: int, *, must_take: bool
) -> list[_Segment]:
    """Takes up to ``longest`` elements from a rank's row.

    Adds to ``missing`` each tensor that was not begun before.
    """
    taken: list[_Segment] = []
    length = 0
    while row and length < longest:
        segment = row[0]
        if segment.index not in missing:
            begun_bytes = sum(unit.nbytes[index] for index in (*missing, segment.index))
            if begun_bytes > most_bytes and missing and not (must_take and not taken):
                break
            missing[segment.index] = unit.source.spans[segment.index].spec.numel
        numel = min(segment.numel, longest - length)
        taken.append(replace(segment, numel=numel, offset=length))
        length += numel
        if numel == segment.numel:
            row.pop(0)
        else:
            rest = segment.numel - numel
            row[0] = replace(segment, start=segment.start + numel, numel=rest, source=segment.source + numel)
    return taken


class FlatGather(TensorTransfer):
    """All-gather of a stretch of every rank's shard of an FSDP1 unit; the result is then copied into the tensors.

    A tensor gets memory when its first part is copied out.

    begun: tensors that earlier gathers have copied in part.
    """

    def __init__(self, unit: FlatLayout, dtype: torch.dtype, segments: list[_Segment], begun: set[int]) -> None:
        self.unit = unit
        length = max(segment.offset + segment.numel for segment in segments)
        self._dtype, self._segments, self._length = dtype, segments, length
        self.order = unit.order
        self.names = list(dict.fromkeys(unit.names[segment.index] for segment in segments))
        self.shard_group: ShardGroup = unit.source.shard_group
        self.opened_bytes = sum(unit.nbytes[index] for index in {segment.index for segment in segments} - begun)
        self.begun_bytes = sum(unit.nbytes[index] for index in begun)
        self.nbytes = length * self.shard_group.size * dtype.itemsize + self.opened_bytes
        self._local = [segment for segment in segments if segment.rank == self.shard_group.rank]
        # Where this rank's part begins in its shard, if the part is ready there to be gathered.
        start = self._local[0].source if self._local else 0
        in_one = all(segment.source - segment.offset == start for segment in self._local)
        self._start = start if in_one and start + length <= unit.source.chunk else None

    def allocate(self, call: Call) -> None:
        length, rank = self._length, self.shard_group.rank
        shard = call.shards[self.unit.source.place]
        self._outputs = call.units.setdefault(self.unit.order, UnitOutputs(self.unit))
        self._rows = torch.empty(self.shard_group.size * length, dtype=self._dtype, device=call.device)
        part = self._rows[rank * length : (rank + 1) * length]
        self._pieces: list[Piece] = []
        if self._start is not None and self.unit.source.place in call.ready:
            part = shard[self._start : self._start + length]
        else:
            for s in self._local:
                target, source = part[s.offset : s.offset + s.numel], shard[s.source : s.source + s.numel]
                self._pieces.append(Piece(target, source, self.unit.names[s.index], s.start))
        self._gathers = [Gather(self._rows, part)]

    def list_pieces(self) -> Iterable[Piece]:
        return self._pieces

    def list_own_shards(self) -> Iterator[SourceShard]:
        part = self._gathers[0].input
        for s in self._local:
            span, local = self.unit.source.spans[s.index], part[s.offset : s.offset + s.numel]
            group = self.shard_group.group
            place = ShardPlace(numel=s.numel, offset=s.start, stride=span.stride, group=group)
            yield SourceShard(spec=span.spec, local=local, shape=local.shape, place=place)

    def make_results(self) -> Iterator[OrderedResult]:
        targets, parts = [], []
        for s in self._segments:
            begin = s.rank * self._length + s.offset
            targets.append(self._outputs.allocate_flat(s.index, self._rows.device)[s.start : s.start + s.numel])
            parts.append(self._rows[begin : begin + s.numel])
        private.copy_all(targets, parts)
        for s in self._segments:
            yield from self._outputs.add(s.index, s.numel)


class UnitGather(TensorTransfer):
    """All-gather of a whole FSDP1 unit: the joined shards are its flat parameter, from which the tensors are copied.

    The tensors are copied a few at a time when they are yielded, so the next unit can be gathered in the memory that a
    copy of the whole unit would take. A tensor that is nearly the whole unit is yielded as a view of the gathered
    memory.

    together_bytes: the number of bytes that are copied at once; a larger tensor is copied alone.
    """

    def __init__(self, unit: FlatLayout, together_bytes: int) -> None:
        source = unit.source
        self._unit, self._dtype = unit, unit.dtypes[0]
        self.order, self.names = unit.order, unit.names
        self.shard_group: ShardGroup = source.shard_group
        self._numel = source.chunk * self.shard_group.size
        self.nbytes = self._numel * self._dtype.itemsize
        self._in_place = self._find_index_in_place()
        copied = [index for index in range(len(unit.nbytes)) if index != self._in_place]
        self._groups = _group_neighbours(copied, unit.nbytes, together_bytes)
        # The caller has the last of those before.
        before = [0, *(unit.nbytes[group[-1]] for group in self._groups)]
        self.copied_bytes = max(
            (last + sum(unit.nbytes[i] for i in group) for last, group in zip(before, self._groups, strict=False)),
            default=0,
        )

    def _find_index_in_place(self) -> int | None:
        """Finds the tensor that is nearly the whole unit and begins at an aligned address; None if there is none."""
        for index, span in enumerate(self._unit.source.spans):
            is_aligned = span.offset * self._dtype.itemsize % _ALIGNMENT == 0
            if is_aligned and (self.nbytes - self._unit.nbytes[index]) * _SMALL_PART <= self.nbytes:
                return index
        return None

    def allocate(self, call: Call) -> None:
        self._flat = torch.empty(self._numel, dtype=self._dtype, device=call.device)
        place, rank, chunk = self._unit.source.place, self.shard_group.rank, self._unit.source.chunk
        part = call.shards[place]
        self._pieces: list[Piece] = []
        if place not in call.ready:
            target = self._flat[rank * chunk : (rank + 1) * chunk]
            self._pieces.append(Piece(target, part, "", 0))
            part = target
        self._gathers = [Gather(self._flat, part)]

    def list_pieces(self) -> Iterable[Piece]:
        return self._pieces

    def list_own_shards(self) -> Iterable[SourceShard]:
        return place_unit(self._unit.source, self._gathers[0].input)

    def make_results(self) -> Iterator[OrderedResult]:
        spans = self._unit.source.spans
        copied = _CopiedOut(self._flat, spans, self._groups)
        for index, span in enumerate(spans):
            stays = index == self._in_place
            take = functools.partial(copied.take, index)
            yield self.order + index, span.spec, _view_span(self._flat, span, span.offset) if stays else take


class _CopiedOut:
    """Tensors of a flat parameter, taken in order.

    The tensors of a group get memory when the first of them is taken.
    """

    def __init__(self, flat: torch.Tensor, spans: Sequence[Span], groups: Sequence[Sequence[int]]) -> None:
        self._flat: torch.Tensor | None = flat if groups else None
        self._spans = spans
        self._groups = collections.deque(groups)
        self._copied: dict[int, torch.Tensor] = {}

    def take(self, index: int) -> torch.Tensor:
        if index not in self._copied:
            self._copy(self._groups.popleft())
        return _view_span(self._copied.pop(index), self._spans[index], 0)

    @disable_autograd
    def _copy(self, group: Sequence[int]) -> None:
        flat = self._flat
        assert flat is not None
        spans = [self._spans[index] for index in group]
        outputs = [torch.empty(span.spec.numel, dtype=flat.dtype, device=flat.device) for span in spans]
        private.copy_all(outputs, [flat[span.offset : span.offset + span.spec.numel] for span in spans])
        self._copied = dict(zip(group, outputs, strict=True))
        if not self._groups:
            self._flat = None


def _view_span(flat: torch.Tensor, span: Span, offset: int) -> torch.Tensor:
    return flat.as_strided(span.spec.shape, span.stride, offset)


def _group_neighbours(indices: Sequence[int], sizes: Sequence[int], together_bytes: int) -> list[list[int]]:
    """Groups neighbours, as many as fit into ``together_bytes``, or into 9/8 of the largest tensor if that is more."""
    largest = max((sizes[index] for index in indices), default=0)
    most = max(together_bytes, largest + largest // 8)
    groups: list[list[int]] = []
    nbytes = most
    for index in indices:
        nbytes += sizes[index]
        if nbytes > most or not groups:
            groups.append([])
            nbytes = sizes[index]
        groups[-1].append(index)
    return groups
