"""How FSDP1's flat parameters are gathered: in stretches of every rank's shard, copied out to the tensors."""

from __future__ import annotations

import collections
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fsdp_doctor.extract.dtypes import OutputDtypes
from fsdp_doctor.extract.loader import Piece
from fsdp_doctor.extract.sources import FlatUnit, ShardGroup, Span, TensorSpec
from fsdp_doctor.extract.transfers import Call, Gather, Result, TensorTransfer
from fsdp_doctor.extract.without_autograd import without_autograd
from fsdp_doctor.fsdp import private

# Where CUDA's allocator begins a tensor, in bytes; and which part of a unit may be wasted beside a tensor.
_ALIGNMENT = 512
_SMALL_PART = 64


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


class FlatLayout:
    """An FSDP1 unit and the dtypes in which its tensors are gathered."""

    def __init__(self, order: int, source: FlatUnit, dtypes: OutputDtypes) -> None:
        self.order, self.source = order, source
        self.dtypes = [dtypes.of(span.spec) for span in source.spans]

    def nbytes(self, index: int) -> int:
        return self.source.spans[index].spec.numel * self.dtypes[index].itemsize

    def nbytes_of_each(self) -> list[int]:
        return [self.nbytes(index) for index in range(len(self.dtypes))]

    def name(self, index: int) -> str:
        """The first one of the tensor."""
        return self.source.spans[index].spec.names[0]

    def names(self) -> list[str]:
        return list(map(self.name, range(len(self.source.spans))))

    def rows(self, dtype: torch.dtype) -> list[list[_Segment]]:
        """What each rank has of the spans that are gathered in that dtype, in the order of its shard."""
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
    """The full tensors of an FSDP1 unit, which one gather or several fill part by part."""

    def __init__(self, unit: FlatLayout) -> None:
        self._unit = unit
        self._missing = [span.spec.numel for span in unit.source.spans]
        self._flat: dict[int, torch.Tensor] = {}
        self._begun: set[int] = set()

    def held_bytes(self) -> int:
        """Device memory of the tensors that have been gathered in part."""
        return sum(map(self._unit.nbytes, self._begun))

    def flat(self, index: int, device: torch.device) -> torch.Tensor:
        """The tensor's memory, 1-D, in the order in which it lies in the flat parameter."""
        if index not in self._flat:
            numel = self._unit.source.spans[index].spec.numel
            self._flat[index] = torch.empty(numel, dtype=self._unit.dtypes[index], device=device)
        return self._flat[index]

    def add(self, index: int, numel: int) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        """So many elements more have been gathered; yields the tensor once all have."""
        self._missing[index] -= numel
        self._begun.add(index)
        if not self._missing[index]:
            span = self._unit.source.spans[index]
            self._begun.remove(index)
            yield self._unit.order + index, span.spec, self._flat.pop(index).as_strided(span.spec.shape, span.stride)


def flat_gathers(unit: FlatLayout, bucket_bytes: int, room: int, merged: Collection[str]) -> Iterator[TensorTransfer]:
    """The gathers of one FSDP1 unit.

    room: device memory that a unit may take. One that fits takes one gather, if at least half of it is asked for. Of
    another each has its rows and the tensors that it begins within a bucket, and takes from every rank, so that all of
    their links are busy; but no rank begins a tensor that does not fit beside those that have been begun, unless it is
    the first that has something left. merged: the first names of the weights into which adapters are merged.
    """
    if len(set(unit.dtypes)) == 1 and set(merged).isdisjoint(unit.names()):
        whole = UnitGather(unit, bucket_bytes // 8)
        if whole.nbytes + whole.copied_bytes <= room and whole.nbytes <= 2 * sum(unit.nbytes_of_each()):
            yield whole
            return
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
            missing = {index: numel for index, numel in missing.items() if numel}
            yield FlatGather(unit, dtype, segments, begun)


def _take(
    unit: FlatLayout, row: list[_Segment], longest: int, missing: dict[int, int], most_bytes: int, *, must_take: bool
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
    """A stretch of every rank's shard of an FSDP1 unit, in one all-gather, and a copy out of it.

    The tensors have memory from when their first part is copied out. begun: those of which gathers before it have some.
    """

    def __init__(self, unit: FlatLayout, dtype: torch.dtype, segments: list[_Segment], begun: set[int]) -> None:
        self.unit = unit
        length = max(segment.offset + segment.numel for segment in segments)
        self._dtype, self._segments, self._length = dtype, segments, length
        self.order = unit.order
        self.shard_group: ShardGroup = unit.source.shard_group
        self.opened_bytes = sum(map(unit.nbytes, {segment.index for segment in segments} - begun))
        self.nbytes = length * self.shard_group.size * dtype.itemsize + self.opened_bytes
        self._own = [segment for segment in segments if segment.rank == self.shard_group.rank]
        self._places = [(s.index, s.start, s.start + s.numel) for s in segments]
        self._parts = [(s.rank * length + s.offset, s.rank * length + s.offset + s.numel) for s in segments]
        self._start = self._stretch()

    def _stretch(self) -> int | None:
        """Where this rank's part begins in its shard, if it lies there as it is to be gathered."""
        start = self._own[0].source if self._own else 0
        in_one = all(segment.source - segment.offset == start for segment in self._own)
        return start if in_one and start + self._length <= self.unit.source.chunk else None

    def names(self) -> Iterable[str]:
        return dict.fromkeys(self.unit.name(segment.index) for segment in self._segments)

    def allocate(self, call: Call) -> None:
        length, rank = self._length, self.shard_group.rank
        shard = call.shards[self.unit.source.place]
        self._outputs = call.units.setdefault(self.unit.order, UnitOutputs(self.unit))
        self._rows = torch.empty(self.shard_group.size * length, dtype=self._dtype, device=call.device)
        own = self._rows[rank * length : (rank + 1) * length]
        self._pieces: list[Piece] = []
        if self._start is not None and self.unit.source.place in call.ready:
            own = shard[self._start : self._start + length]
        else:
            self._pieces = [
                Piece(
                    own[s.offset : s.offset + s.numel],
                    shard[s.source : s.source + s.numel],
                    self.unit.name(s.index),
                    s.start,
                )
                for s in self._own
            ]
        self._gathers = [Gather(self._rows, own)]

    def pieces(self) -> Iterable[Piece]:
        return self._pieces

    def gathers(self) -> Sequence[Gather]:
        return self._gathers

    def results(self) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        rows = self.__dict__.pop("_rows")
        del self._pieces, self._gathers
        outputs, device = self._outputs, rows.device
        targets = [outputs.flat(index, device)[start:end] for index, start, end in self._places]
        parts = [rows[begin:end] for begin, end in self._parts]
        private.copy_all(targets, parts)
        del rows, targets, parts
        for segment in self._segments:
            yield from self._outputs.add(segment.index, segment.numel)


class UnitGather(TensorTransfer):
    """A whole FSDP1 unit: its shards joined are its flat parameter, and the tensors are copied out of that.

    They are copied a few at a time, as they are handed out, so that two units fit where one and its copy would. A
    tensor beside which there is next to nothing in the unit stays where it was gathered.

    together_bytes: how much is copied at once; more, where one of the tensors is larger.
    """

    def __init__(self, unit: FlatLayout, together_bytes: int) -> None:
        source = unit.source
        self._unit, self._dtype = unit, unit.dtypes[0]
        self.order = unit.order
        self.shard_group: ShardGroup = source.shard_group
        self._numel = source.chunk * self.shard_group.size
        self.nbytes = self._numel * self._dtype.itemsize
        sizes = unit.nbytes_of_each()
        self._in_place = self._stays(sizes)
        copied = [index for index in range(len(sizes)) if index != self._in_place]
        self._groups = _groups(copied, sizes, together_bytes)
        # The caller has the last of those before.
        before = [0, *(sizes[group[-1]] for group in self._groups)]
        self.copied_bytes = max(
            (last + sum(sizes[index] for index in group) for last, group in zip(before, self._groups, strict=False)),
            default=0,
        )

    def _stays(self, sizes: Sequence[int]) -> int | None:
        """Which tensor is all but a small part of the unit, and begins where memory may."""
        for index, span in enumerate(self._unit.source.spans):
            is_aligned = span.offset * self._dtype.itemsize % _ALIGNMENT == 0
            if is_aligned and (self.nbytes - sizes[index]) * _SMALL_PART <= self.nbytes:
                return index
        return None

    def names(self) -> Iterable[str]:
        return self._unit.names()

    def allocate(self, call: Call) -> None:
        self._flat = torch.empty(self._numel, dtype=self._dtype, device=call.device)
        place, rank, chunk = self._unit.source.place, self.shard_group.rank, self._unit.source.chunk
        own = call.shards[place]
        self._pieces: list[Piece] = []
        if place not in call.ready:
            target = self._flat[rank * chunk : (rank + 1) * chunk]
            self._pieces.append(Piece(target, own, "", 0))
            own = target
        self._gathers = [Gather(self._flat, own)]

    def pieces(self) -> Iterable[Piece]:
        return self._pieces

    def gathers(self) -> Sequence[Gather]:
        return self._gathers

    def results(self) -> Iterator[tuple[int, TensorSpec, Result]]:
        spans, flat = self._unit.source.spans, self.__dict__.pop("_flat")
        del self._pieces, self._gathers
        copied = _CopiedOut(flat, spans, self._groups)
        for index, span in enumerate(spans):
            stays = index == self._in_place
            result: Result = _placed(flat, span, span.offset) if stays else functools.partial(copied.take, index)
            yield self.order + index, span.spec, result


class _CopiedOut:
    """The tensors of a flat parameter, each with memory of its own from when its group is asked for, in their order."""

    def __init__(self, flat: torch.Tensor, spans: Sequence[Span], groups: Sequence[Sequence[int]]) -> None:
        self._flat: torch.Tensor | None = flat if groups else None
        self._spans = spans
        self._groups = collections.deque(groups)
        self._copied: dict[int, torch.Tensor] = {}

    def take(self, index: int) -> torch.Tensor:
        if index not in self._copied:
            self._copy(self._groups.popleft())
        return _placed(self._copied.pop(index), self._spans[index], 0)

    @without_autograd
    def _copy(self, group: Sequence[int]) -> None:
        flat = self._flat
        assert flat is not None
        spans = [self._spans[index] for index in group]
        outputs = [torch.empty(span.spec.numel, dtype=flat.dtype, device=flat.device) for span in spans]
        private.copy_all(outputs, [flat[span.offset : span.offset + span.spec.numel] for span in spans])
        self._copied = dict(zip(group, outputs, strict=True))
        if not self._groups:
            self._flat = None


def _placed(flat: torch.Tensor, span: Span, offset: int) -> torch.Tensor:
    return flat.as_strided(span.spec.shape, span.stride, offset)


def _groups(indices: Sequence[int], sizes: Sequence[int], together_bytes: int) -> list[list[int]]:
    """Neighbours, as many as fit; each with what is small beside the largest."""
    largest = max((sizes[index] for index in indices), default=0)
    most = max(together_bytes, largest + largest // 8)
    groups: list[list[int]] = []
    held = most
    for index in indices:
        held += sizes[index]
        if held > most or not groups:
            groups.append([])
            held = sizes[index]
        groups[-1].append(index)
    return groups
