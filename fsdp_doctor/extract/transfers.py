"""How tensors are gathered: each transfer allocates its outputs, loads this rank's part and takes part in a collective.

Outputs are allocated while the caller's stream is current, so that memory which the caller lets go of
is used again in the order of its stream, whatever the host has run ahead of.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from fsdp_doctor.extract.loader import Piece
from fsdp_doctor.extract.lora import Delta
from fsdp_doctor.extract.sources import Placed, Plain, Rows, ShardGroup, TensorSpec
from fsdp_doctor.fsdp import private

if TYPE_CHECKING:
    from fsdp_doctor.extract.flat_transfers import UnitOutputs


Result: TypeAlias = torch.Tensor | Callable[[], torch.Tensor]
"""A tensor, or what copies it out of memory that it shared with others."""


@dataclass(slots=True, eq=False)
class Gather:
    """One all-gather. ``input`` may be this rank's part of ``output``."""

    output: torch.Tensor
    input: torch.Tensor


@dataclass(eq=False)
class Call:
    """What one extraction has of its own, where the plan is that of many.

    shards: what this rank holds, by the places of the sources. ready: the places of those that a collective can read
    as they are. units: the outputs of FSDP1 units that have been gathered in part, by the units' order.
    """

    device: torch.device
    shards: Sequence[torch.Tensor]
    ready: frozenset[int]
    units: dict[int, UnitOutputs] = field(default_factory=dict)


class TensorTransfer(ABC):
    """What one bucket does with some of the model's tensors. It is kept with the plan; ``begun`` is of one call.

    order: where its first tensor comes among all. nbytes: the device memory that it takes at most, of which
    collecting_bytes in ``collect`` and opened_bytes when its tensors are copied out; copied_bytes: beside that, while
    its tensors are handed out. shard_group: None where nothing is communicated.
    """

    order: int
    nbytes: int
    collecting_bytes: int = 0
    opened_bytes: int = 0
    copied_bytes: int = 0
    shard_group: ShardGroup | None

    def begun(self, call: Call) -> Self:
        """With memory, on the caller's stream."""
        transfer = copy.copy(self)
        try:
            transfer.allocate(call)
        except BaseException:
            # The error's traceback holds closures, and so what it could allocate.
            vars(transfer).clear()
            raise
        return transfer

    @abstractmethod
    def names(self) -> Iterable[str]:
        """The first name of each tensor of which it has a part."""

    @abstractmethod
    def allocate(self, call: Call) -> None:
        """On the caller's stream."""

    @abstractmethod
    def pieces(self) -> Iterable[Piece]:
        """What is to be loaded of this rank's part, and where."""

    def copies(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """(targets, sources) beside the pieces: of the same shapes and dtypes, and all of them on the device."""
        return (), ()

    def gathers(self) -> Sequence[Gather]:
        """On the gathering stream, as part of one collective of the bucket."""
        return ()

    def collect(self, deltas: Mapping[str, list[Delta]]) -> None:  # noqa: B027, most have nothing to do
        """On the gathering stream, after the bucket's collective; with collectives of its own."""

    @abstractmethod
    def results(self) -> Iterable[tuple[int, TensorSpec, Result]]:
        """(order, spec, full tensor), on the caller's stream, once it has waited for the gather.

        The transfer holds none of them any more.
        """


# What gloo and NCCL both carry; anything else (8-bit floats, complex numbers, 16-bit integers) goes as bytes.
_CARRIED = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)


def _as_carried(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor that a collective takes."""
    return tensor if tensor.dtype in _CARRIED else tensor.view(-1).view(torch.uint8)


def handed_out(result: Result) -> torch.Tensor:
    """On the caller's stream; those of one transfer in their order."""
    return result if isinstance(result, torch.Tensor) else result()


class LocalCopy(TensorTransfer):
    """A tensor that is whole on every rank."""

    shard_group = None

    def __init__(self, order: int, source: Plain, dtype: torch.dtype) -> None:
        self.order, self._source, self._dtype = order, source, dtype
        self.nbytes = source.spec.numel * dtype.itemsize

    def names(self) -> Iterable[str]:
        return self._source.spec.names[:1]

    def allocate(self, call: Call) -> None:
        spec, part = self._source.spec, self._source.part
        self._local = call.shards[self._source.place]
        if part is not None:
            offset = self._local.storage_offset() + part.offset
            self._local = self._local.as_strided(part.shape, part.stride, offset)
        self._full = torch.empty(spec.shape, dtype=self._dtype, device=call.device)

    def pieces(self) -> Iterable[Piece]:
        return [Piece(self._full.view(-1), self._local.reshape(-1), self._source.spec.names[0], 0)]

    def results(self) -> Iterable[tuple[int, TensorSpec, torch.Tensor]]:
        del self._local
        return [(self.order, self._source.spec, self.__dict__.pop("_full"))]


class RowsGather(TensorTransfer):
    """Large tensors sharded by rows: each is gathered where it stays.

    From the shard as it lies; where it must be loaded first, into its place, from there.
    """

    def __init__(self, orders: list[int], sources: list[Rows], dtype: torch.dtype) -> None:
        self.order, self._orders, self._sources, self._dtype = orders[0], orders, sources, dtype
        self.shard_group: ShardGroup = sources[0].shard_group
        self.nbytes = sum(source.chunk for source in sources) * self.shard_group.size * dtype.itemsize

    def names(self) -> Iterable[str]:
        return [source.spec.names[0] for source in self._sources]

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
            own = full.view(-1)[rank * chunk : (rank + 1) * chunk]
            target = own if source.held == chunk else own[: source.held]
            self._pieces.append(Piece(target, shard.reshape(-1), spec.names[0], rank * chunk))
            self._gathers.append(Gather(full.view(-1), own))

    def pieces(self) -> Iterable[Piece]:
        return self._pieces

    def gathers(self) -> Sequence[Gather]:
        return self._gathers

    def results(self) -> Iterable[tuple[int, TensorSpec, torch.Tensor]]:
        every = self.__dict__.pop("_full")
        del self._pieces, self._gathers
        for order, source, full in zip(self._orders, self._sources, every, strict=True):
            spec = source.spec
            yield order, spec, full if full.shape == spec.shape else full[: spec.numel].view(spec.shape)


class PackedGather(TensorTransfer):
    """Many small tensors sharded by rows, in one all-gather, and a copy out of it in one kernel.

    They may lie anywhere in the model: to gather some with each bucket would cost the host as much for each.
    """

    def __init__(self, orders: list[int], sources: list[Rows], dtype: torch.dtype) -> None:
        self.order, self.orders, self._sources, self._dtype = orders[0], orders, sources, dtype
        self.shard_group: ShardGroup = sources[0].shard_group
        self._chunks = [source.chunk for source in sources]
        self._places = frozenset(source.place for source in sources)
        size = self.shard_group.size
        evens = [source.spec.numel == source.chunk * size for source in sources]
        self._tensors = [(o, s.spec, is_even) for o, s, is_even in zip(orders, sources, evens, strict=True)]
        self.nbytes = 2 * sum(self._chunks) * self.shard_group.size * dtype.itemsize

    def names(self) -> Iterable[str]:
        return [source.spec.names[0] for source in self._sources]

    def allocate(self, call: Call) -> None:
        size, device, dtype = self.shard_group.size, call.device, self._dtype
        self._shards = [call.shards[source.place] for source in self._sources]
        self._rows = torch.empty(size, sum(self._chunks), dtype=dtype, device=device)
        self._outputs = [torch.empty((size, chunk), dtype=dtype, device=device) for chunk in self._chunks]
        self._is_ready = self._places <= call.ready

    def copies(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        if not self._is_ready:
            return (), ()
        return private.views_like(self._rows[self.shard_group.rank], self._shards), self._shards

    def pieces(self) -> Iterator[Piece]:
        if self._is_ready:
            return
        rank = self.shard_group.rank
        places = self._rows[rank].split(self._chunks)
        for place, source, shard in zip(places, self._sources, self._shards, strict=True):
            target = place if source.held == source.chunk else place[: source.held]
            yield Piece(target, shard.reshape(-1), source.spec.names[0], rank * source.chunk)

    def gathers(self) -> Sequence[Gather]:
        return [Gather(self._rows.view(-1), self._rows[self.shard_group.rank])]

    def results(self) -> Iterator[tuple[int, TensorSpec, torch.Tensor]]:
        del self._shards
        outputs = self.__dict__.pop("_outputs")
        torch.split_with_sizes_copy(self.__dict__.pop("_rows"), self._chunks, dim=1, out=outputs)
        for (order, spec, is_even), output in zip(self._tensors, outputs, strict=True):
            yield order, spec, (output if is_even else output.view(-1)[: spec.numel]).view(spec.shape)


class Redistribution(TensorTransfer):
    """Any other DTensor, by DTensor's own redistribution; what is merged into it is added to the full tensor."""

    def __init__(self, order: int, source: Placed, dtype: torch.dtype) -> None:
        self.order, self._source, self._dtype = order, source, dtype
        self.shard_group: ShardGroup = source.shard_group
        nbytes = source.spec.numel * max(dtype.itemsize, source.spec.dtype.itemsize)
        self.nbytes, self.collecting_bytes = 4 * nbytes, 3 * nbytes

    def names(self) -> Iterable[str]:
        return self._source.spec.names[:1]

    def allocate(self, call: Call) -> None:
        self._shard = call.shards[self._source.place]
        self._local = torch.empty(self._shard.shape, dtype=self._shard.dtype, device=call.device)
        self._full = torch.empty(self._source.spec.shape, dtype=self._dtype, device=call.device)

    def pieces(self) -> Iterable[Piece]:
        return [Piece(self._local.view(-1), self._shard.reshape(-1), "", 0)]

    def collect(self, deltas: Mapping[str, list[Delta]]) -> None:
        source, spec = self._source, self._source.spec
        merged = deltas.get(spec.names[0], [])
        full = _redistributed(self._local if merged else self._local.to(self._dtype), source)
        for delta in merged:
            full = full + delta.part(0, spec.numel).view(spec.shape)
        self._full.copy_(full)

    def results(self) -> Iterable[tuple[int, TensorSpec, torch.Tensor]]:
        del self._local, self._shard
        return [(self.order, self._source.spec, self.__dict__.pop("_full"))]


def _redistributed(local: torch.Tensor, source: Placed) -> torch.Tensor:
    """The full tensor. Where the dtype is not carried its bytes are one dim more, which is not sharded."""
    shape, stride, dtype = source.spec.shape, source.stride, local.dtype
    is_carried = dtype in _CARRIED
    if not is_carried:
        local = local.unsqueeze(-1).view(torch.uint8)
        shape, stride = torch.Size((*shape, dtype.itemsize)), (*(step * dtype.itemsize for step in stride), 1)
    # Without shape and stride, from_local takes every shard to be as long as this one.
    placed = DTensor.from_local(
        local, source.mesh, source.placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()
    return placed if is_carried else placed.contiguous().view(dtype).squeeze(-1)


def all_gather(transfers: Sequence[TensorTransfer]) -> None:
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
        outputs, inputs = [_as_carried(g.output) for g in batch], [_as_carried(g.input) for g in batch]
        private.all_gather(group, outputs, inputs).wait()
