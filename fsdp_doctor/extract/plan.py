"""What is yielded, in which order, and in which buckets: the same on every rank, before any communication."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from typing_extensions import assert_never

from fsdp_doctor.extract.agreement import ComparedPlan
from fsdp_doctor.extract.dtypes import OutputDtypes
from fsdp_doctor.extract.flat_transfers import FlatGather, FlatLayout, flat_gathers
from fsdp_doctor.extract.lora import LoraAdapter
from fsdp_doctor.extract.sources import FlatUnit, Placed, Plain, Rows, ShardGroup, Source, specs
from fsdp_doctor.extract.transfers import LocalCopy, PackedGather, Redistribution, RowsGather, TensorTransfer

# Up to this part of a bucket tensors share an all-gather.
_SHARING_PART = 8


@dataclass(kw_only=True, eq=False)
class Plan:
    """What one model and one call's arguments come to. Nothing in it is a tensor, so that it may be kept.

    all_sources: the adapters among them; sources: what is yielded. ranks: all that take part. adapters, factors:
    which factors make up what is merged into a weight, and where they are. most_bytes: the device memory that
    buckets and the caller's last tensor may take together. ready: the places of the shards that a collective can read
    as they are.
    """

    all_sources: list[Source]
    sources: list[Source]
    adapters: dict[str, list[LoraAdapter]]
    factors: dict[str, Source]
    dtypes: OutputDtypes
    device: torch.device
    ranks: tuple[int, ...]
    buckets: list[Bucket]
    most_bytes: int
    ready: frozenset[int]
    compared: ComparedPlan


def signature(sources: Sequence[Source], dtypes: OutputDtypes, settings: str) -> list[str]:
    """A line for each tensor and one for the settings: what all ranks must have alike."""
    lines = [settings]
    for source in sources:
        layout = _layout(source)
        lines += [f"{' = '.join(s.names)}: {list(s.shape)} {dtypes.of(s)} {layout}" for s in specs(source)]
    return lines


def _layout(source: Source) -> str:
    match source:
        case Plain():
            return "whole"
        case Rows():
            return f"in {source.shard_group.size} shards of {source.chunk}"
        case Placed():
            return str(source.placements)
        case FlatUnit():
            return f"in a flat parameter of {source.shard_group.size} shards of {source.chunk}"
        case _:
            assert_never(source)


def shard_groups(sources: Sequence[Source]) -> list[ShardGroup]:
    found = {source.shard_group.ranks: source.shard_group for source in sources if not isinstance(source, Plain)}
    return list(found.values())


def ready_places(
    sources: Sequence[Source],
    shards: Sequence[torch.Tensor],
    dtypes: OutputDtypes,
    device: torch.device,
    merged: Collection[str],
) -> frozenset[int]:
    """Of the shards that a collective can read as they are: on the device, in its dtype, of full length."""

    def is_ready(source: Source) -> bool:
        shard = shards[source.place]
        names = {spec.names[0] for spec in specs(source)}
        there = shard.device == device and shard.is_contiguous() and names.isdisjoint(merged)
        is_even = not isinstance(source, Rows) or source.spec.numel == source.chunk * source.shard_group.size
        return there and is_even and {dtypes.of(spec) for spec in specs(source)} == {shard.dtype}

    return frozenset(source.place for source in sources if isinstance(source, Rows | FlatUnit) and is_ready(source))


def ranks_of(sources: Sequence[Source]) -> tuple[int, ...]:
    """All that take part: of the shard groups of a model the largest has the others in it."""
    return max((shard_group.ranks for shard_group in shard_groups(sources)), key=len, default=(0,))


def most_bytes(sources: Sequence[Source], dtypes: OutputDtypes, bucket_bytes: int) -> int:
    """Device memory that buckets and the caller's last tensor may take together.

    A bucket and the largest tensor, or two and one that shares an all-gather. Where the largest is larger than a
    bucket and most of the model is in tensors half as large at least, as in fused experts, one of them more: so that
    the next is loaded while the caller has the last.
    """
    sizes = [s.numel * dtypes.of(s).itemsize for source in sources for s in specs(source)]
    largest = max(sizes, default=0)
    most = max(bucket_bytes + largest, 2 * bucket_bytes + min(largest, bucket_bytes // _SHARING_PART))
    is_rule = largest > bucket_bytes and 2 * sum(size for size in sizes if 2 * size >= largest) > sum(sizes)
    return most + (largest if is_rule else 0)


@dataclass
class Bucket:
    """What is loaded and gathered together. nbytes: the device memory that it takes at most."""

    transfers: list[TensorTransfer] = field(default_factory=list)
    nbytes: int = 0

    @functools.cached_property
    def units(self) -> frozenset[int]:
        """The FSDP1 units of which it gathers a part, by their order."""
        return frozenset(transfer.unit.order for transfer in self.transfers if isinstance(transfer, FlatGather))

    @property
    def is_gathered(self) -> bool:
        return any(transfer.shard_group is not None for transfer in self.transfers)

    def names(self) -> list[str]:
        """The first name of each tensor of which it has a part."""
        return [name for transfer in self.transfers for name in transfer.names()]


class _Rows:
    """The tensors of a bucket that are sharded by rows: those of one shard group and one dtype are one transfer."""

    def __init__(self, kind: type[RowsGather] | type[PackedGather]) -> None:
        self._kind = kind
        self._found: dict[tuple[tuple[int, ...], torch.dtype], tuple[list[int], list[Rows]]] = {}

    def add(self, order: int, source: Rows, dtype: torch.dtype) -> None:
        orders, sources = self._found.setdefault((source.shard_group.ranks, dtype), ([], []))
        orders.append(order)
        sources.append(source)

    def transfers(self) -> Iterator[TensorTransfer]:
        for (_, dtype), (orders, sources) in self._found.items():
            yield self._kind(orders, sources, dtype)


def buckets(
    sources: Sequence[Source], dtypes: OutputDtypes, bucket_bytes: int, extra_bytes: Mapping[str, int]
) -> Iterator[Bucket]:
    """Each takes ``bucket_bytes`` at most, unless one tensor alone takes more.

    extra_bytes: what is needed beside the tensor of that name while it is gathered.
    """
    bucket, large, small = Bucket(), _Rows(RowsGather), _Rows(PackedGather)
    for order, part, nbytes in _parts(sources, dtypes, bucket_bytes, extra_bytes):
        if bucket.nbytes and bucket.nbytes + nbytes > bucket_bytes:
            yield _complete(bucket, large, small)
            bucket, large, small = Bucket(), _Rows(RowsGather), _Rows(PackedGather)
        bucket.nbytes += nbytes
        if isinstance(part, TensorTransfer):
            bucket.transfers.append(part)
        else:
            dtype = dtypes.of(part.spec)
            (small if _nbytes(part, dtype) <= bucket_bytes // _SHARING_PART else large).add(order, part, dtype)
    last = _complete(bucket, large, small)
    if last.transfers:
        yield last


def _complete(bucket: Bucket, large: _Rows, small: _Rows) -> Bucket:
    bucket.transfers += [*large.transfers(), *small.transfers()]
    return bucket


def _nbytes(source: Rows, dtype: torch.dtype) -> int:
    return source.chunk * source.shard_group.size * dtype.itemsize


def _parts(
    sources: Sequence[Source], dtypes: OutputDtypes, bucket_bytes: int, extra_bytes: Mapping[str, int]
) -> Iterator[tuple[int, TensorTransfer | Rows, int]]:
    """(order, a transfer or a tensor that is to share one, device memory that it takes)."""
    order = 0
    for source in sources:
        if isinstance(source, Rows):
            nbytes = _nbytes(source, dtypes.of(source.spec))
            extra = extra_bytes.get(source.spec.names[0], 0) if extra_bytes else 0
            yield order, source, (2 * nbytes if nbytes <= bucket_bytes // _SHARING_PART else nbytes) + extra
            order += 1
            continue
        for transfer in _transfers(order, source, dtypes, bucket_bytes, extra_bytes):
            yield order, transfer, transfer.nbytes + sum(extra_bytes.get(name, 0) for name in transfer.names())
        order += len(specs(source))


def _transfers(
    order: int, source: Plain | Placed | FlatUnit, dtypes: OutputDtypes, bucket_bytes: int, merged: Collection[str]
) -> Iterator[TensorTransfer]:
    match source:
        case Plain():
            yield LocalCopy(order, source, dtypes.of(source.spec))
        case Placed():
            yield Redistribution(order, source, dtypes.of(source.spec))
        case FlatUnit():
            yield from flat_gathers(FlatLayout(order, source, dtypes), bucket_bytes, merged)
        case _:
            assert_never(source)
