"""How tensors are carried: each step allocates its outputs, loads this rank's part, and is gathered.

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
from fsdp_doctor.extract.sources import (
    FlatUnit,
    Placed,
    Plain,
    Rows,
    ShardGroup,
    TensorSpec,
)
from fsdp_doctor.fsdp import private


@dataclass(frozen=True)
class Gather:
    """One all-gather. ``input`` may be this rank's part of ``output``."""

    output: torch.Tensor
    input: torch.Tensor


class Step(ABC):
    """What one bucket does with some of the model's tensors.

    order: where its first tensor comes among all. nbytes: the device memory that it takes at most.
    shard_group: None where nothing is communicated.
    """

    order: int
    nbytes: int
    shard_group: ShardGroup | None

    @abstractmethod
    def names(self) -> Iterable[str]:
        """The first name of each tensor of which it carries something."""

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
        """(order, entry, full tensor), on the caller's stream, once it has waited for the gather.

        The step holds none of them any more.
        """


class Copied(Step):
    """A tensor that is whole on every rank."""

    shard_group = None

    def __init__(self, order: int, source: Plain, dtype: torch.dtype) -> None:
        self.order, self._source, self._dtype = order, source, dtype
        self.nbytes = source.entry.numel * dtype.itemsize

    def names(self) -> Iterable[str]:
        return self._source.entry.names[:1]

    def allocate(self, device: torch.device) -> None:
        self._full = torch.empty(self._source.entry.shape, dtype=self._dtype, device=device)

    def pieces(self) -> Iterator[Piece]:
        source = self._source
        yield Piece(self._full.view(-1), source.local.reshape(-1), source.entry.names[0], 0)

    def results(self) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        full = self.__dict__.pop("_full")
        yield self.order, self._source.entry, full


class Whole(Step):
    """A large tensor sharded by rows: gathered in place, this rank's part being loaded where it belongs."""

    def __init__(self, order: int, source: Rows, dtype: torch.dtype) -> None:
        self.order, self._source, self._dtype = order, source, dtype
        self.shard_group: ShardGroup = source.shard_group
        self.nbytes = source.chunk * source.shard_group.size * dtype.itemsize

    def names(self) -> Iterable[str]:
        return self._source.entry.names[:1]

    def allocate(self, device: torch.device) -> None:
        source = self._source
        self._padded = torch.empty(source.chunk * source.shard_group.size, dtype=self._dtype, device=device)

    def pieces(self) -> Iterator[Piece]:
        local, start = self._source.local(), self.shard_group.rank * self._source.chunk
        yield Piece(self._padded[start : start + local.numel()], local, self._source.entry.names[0], start)

    def gathers(self) -> list[Gather]:
        start = self.shard_group.rank * self._source.chunk
        return [Gather(self._padded, self._padded[start : start + self._source.chunk])]

    def results(self) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        padded = self.__dict__.pop("_padded")
        entry = self._source.entry
        yield self.order, entry, padded[: entry.numel].view(entry.shape)


class Packed(Step):
    """Many small tensors sharded by rows, in one all-gather, and a copy out of it in one kernel."""

    def __init__(self, orders: list[int], sources: list[Rows], dtype: torch.dtype) -> None:
        self.order, self._orders, self._sources, self._dtype = orders[0], orders, sources, dtype
        self.shard_group: ShardGroup = sources[0].shard_group
        self._chunks = [source.chunk for source in sources]
        self.nbytes = 2 * sum(self._chunks) * self.shard_group.size * dtype.itemsize

    def names(self) -> Iterable[str]:
        return [source.entry.names[0] for source in self._sources]

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
            yield Piece(target, local, source.entry.names[0], self.shard_group.rank * source.chunk)

    def gathers(self) -> list[Gather]:
        return [Gather(self._rows.view(-1), self._rows[self.shard_group.rank])]

    def results(self) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        outputs = self.__dict__.pop("_outputs")
        torch.split_with_sizes_copy(self.__dict__.pop("_rows"), self._chunks, dim=1, out=outputs)
        for order, source, output in zip(self._orders, self._sources, outputs, strict=True):
            entry = source.entry
            padded = output if output.numel() == entry.numel else output.view(-1)[: entry.numel]
            yield order, entry, padded.view(entry.shape)


@dataclass(frozen=True)
class _Cut:
    """A part of one span: ``numel`` elements from ``start`` of it, which one rank holds.

    source: where they begin in that rank's shard. offset: where they begin in its row.
    """

    index: int
    start: int
    numel: int
    rank: int
    source: int
    offset: int


class Assembly:
    """The tensors of an FSDP1 unit, which one gather or several fill piece by piece."""

    def __init__(self, order: int, unit: FlatUnit, dtypes: OutputDtypes) -> None:
        self.order, self.unit = order, unit
        self.dtypes = [dtypes.of(span.entry) for span in unit.spans]
        self._missing = [span.entry.numel for span in unit.spans]
        self._flat: dict[int, torch.Tensor] = {}
        self._begun: set[int] = set()

    def nbytes(self, index: int) -> int:
        return self.unit.spans[index].entry.numel * self.dtypes[index].itemsize

    def held_bytes(self) -> int:
        """Device memory of the tensors of which some pieces have landed and others have not."""
        return sum(map(self.nbytes, self._begun))

    def flat(self, index: int, device: torch.device) -> torch.Tensor:
        """The tensor's memory, 1-D, in the order in which it lies in the flat parameter."""
        if index not in self._flat:
            numel = self.unit.spans[index].entry.numel
            self._flat[index] = torch.empty(numel, dtype=self.dtypes[index], device=device)
        return self._flat[index]

    def add(self, index: int, numel: int) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        """Says that so many elements have landed; yields the tensor once they all have."""
        self._missing[index] -= numel
        self._begun.add(index)
        if not self._missing[index]:
            span = self.unit.spans[index]
            self._begun.remove(index)
            yield self.order + index, span.entry, self._flat.pop(index).as_strided(span.entry.shape, span.stride)

    def rows(self, dtype: torch.dtype) -> list[list[_Cut]]:
        """What each rank has of the spans that are sent in that dtype, in the order of its shard."""
        shard = self.unit.local.numel()
        rows: list[list[_Cut]] = [[] for _ in range(self.unit.shard_group.size)]
        for index, span in enumerate(self.unit.spans):
            if self.dtypes[index] != dtype:
                continue
            first, last = span.offset, span.offset + span.entry.numel
            # An empty one at the very end still lies on a rank.
            lowest = min(first // shard, len(rows) - 1)
            for rank in range(lowest, max(-(-last // shard), lowest + 1)):
                begin, end = max(first, rank * shard), min(last, (rank + 1) * shard)
                rows[rank].append(_Cut(index, begin - first, end - begin, rank, begin - rank * shard, 0))
        return rows


def strips(assembly: Assembly, bucket_bytes: int) -> Iterator[Strip]:
    """The gathers of one FSDP1 unit, each with its rows and the tensors that it begins within a bucket.

    A unit that fits is one strip. Of a larger one each strip takes from every rank, so that all of their
    links are busy; but no rank begins a tensor that does not fit beside those that have been begun, unless
    it is the first that has something left.
    """
    for dtype in dict.fromkeys(assembly.dtypes):
        rows = assembly.rows(dtype)
        longest = max(bucket_bytes // (2 * assembly.unit.shard_group.size * dtype.itemsize), 1)
        missing: dict[int, int] = {}
        while any(rows):
            begun = set(missing)
            first = next(rank for rank, row in enumerate(rows) if row)
            cuts: list[_Cut] = []
            for rank, row in enumerate(rows):
                cuts += _take(assembly, row, longest, missing, bucket_bytes // 2, must_take=rank == first)
            for cut in cuts:
                missing[cut.index] -= cut.numel
            opened = sum(map(assembly.nbytes, {cut.index for cut in cuts} - begun))
            missing = {index: numel for index, numel in missing.items() if numel}
            yield Strip(assembly, dtype, cuts, max(cut.offset + cut.numel for cut in cuts), opened)


def _take(
    assembly: Assembly, row: list[_Cut], longest: int, missing: dict[int, int], most_bytes: int, *, must_take: bool
) -> list[_Cut]:
    """Takes up to ``longest`` elements off a rank's row; ``missing`` gains the tensors that it begins."""
    taken: list[_Cut] = []
    length = 0
    while row and length < longest:
        cut = row[0]
        if cut.index not in missing:
            held = sum(map(assembly.nbytes, missing))
            if held + assembly.nbytes(cut.index) > most_bytes and missing and not (must_take and not taken):
                break
            missing[cut.index] = assembly.unit.spans[cut.index].entry.numel
        numel = min(cut.numel, longest - length)
        taken.append(replace(cut, numel=numel, offset=length))
        length += numel
        if numel == cut.numel:
            row.pop(0)
        else:
            row[0] = replace(cut, start=cut.start + numel, numel=cut.numel - numel, source=cut.source + numel)
    return taken


class Strip(Step):
    """A stretch of every rank's shard of an FSDP1 unit, in one all-gather."""

    def __init__(
        self, assembly: Assembly, dtype: torch.dtype, cuts: list[_Cut], length: int, opened_bytes: int
    ) -> None:
        self.assembly = assembly
        self._dtype, self._cuts, self._length = dtype, cuts, length
        self.order = assembly.order
        self.shard_group: ShardGroup = assembly.unit.shard_group
        self.nbytes = length * self.shard_group.size * dtype.itemsize + opened_bytes

    def names(self) -> Iterable[str]:
        spans = self.assembly.unit.spans
        return dict.fromkeys(spans[cut.index].entry.names[0] for cut in self._cuts)

    def allocate(self, device: torch.device) -> None:
        self._rows = torch.empty(self.shard_group.size, self._length, dtype=self._dtype, device=device)
        self._targets = [self.assembly.flat(cut.index, device)[cut.start : cut.start + cut.numel] for cut in self._cuts]

    def pieces(self) -> Iterator[Piece]:
        row, unit = self._rows[self.shard_group.rank], self.assembly.unit
        for cut in self._cuts:
            if cut.rank == self.shard_group.rank:
                yield Piece(
                    row[cut.offset : cut.offset + cut.numel],
                    unit.local[cut.source : cut.source + cut.numel],
                    unit.spans[cut.index].entry.names[0],
                    cut.start,
                )

    def gathers(self) -> list[Gather]:
        return [Gather(self._rows.view(-1), self._rows[self.shard_group.rank])]

    def results(self) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        rows, targets = self.__dict__.pop("_rows"), self.__dict__.pop("_targets")
        pieces = [rows[cut.rank, cut.offset : cut.offset + cut.numel] for cut in self._cuts]
        if pieces:
            torch._foreach_copy_(targets, pieces)
        del rows, targets, pieces
        for cut in self._cuts:
            yield from self.assembly.add(cut.index, cut.numel)


class Redistributed(Step):
    """Any other DTensor, by DTensor's own redistribution; what is merged into it is added to the full tensor."""

    def __init__(self, order: int, source: Placed, dtype: torch.dtype) -> None:
        self.order, self._source, self._dtype = order, source, dtype
        self.shard_group: ShardGroup = source.shard_group
        self.nbytes = 4 * source.entry.numel * max(dtype.itemsize, source.entry.dtype.itemsize)

    def names(self) -> Iterable[str]:
        return self._source.entry.names[:1]

    def allocate(self, device: torch.device) -> None:
        local = self._source.tensor.to_local()
        self._local = torch.empty(local.shape, dtype=local.dtype, device=device)
        self._full = torch.empty(self._source.entry.shape, dtype=self._dtype, device=device)

    def pieces(self) -> Iterator[Piece]:
        yield Piece(self._local.view(-1), self._source.tensor.to_local().reshape(-1), "", 0)

    def collect(self, deltas: Mapping[str, list[Delta]]) -> None:
        tensor, entry = self._source.tensor, self._source.entry
        merged = deltas.get(entry.names[0], [])
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
            full = full + delta.part(0, entry.numel).view(entry.shape)
        self._full.copy_(full)

    def results(self) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        del self._local
        yield self.order, self._source.entry, self.__dict__.pop("_full")


def all_gather(steps: list[Step]) -> None:
    """One collective for each shard_group and dtype of the bucket, in the order of the steps.

    gloo joins the tensors of a coalesced all-gather as if they had one dtype.
    """
    gathers: dict[tuple[tuple[int, ...], torch.dtype], tuple[dist.ProcessGroup, list[Gather]]] = {}
    for step in steps:
        for gather in step.gathers():
            assert step.shard_group is not None
            key = step.shard_group.ranks, gather.output.dtype
            gathers.setdefault(key, (step.shard_group.group, []))[1].append(gather)
    for group, batch in gathers.values():
        private.all_gather(group, [g.output for g in batch], [g.input for g in batch]).wait()
