"""What is yielded, in which order, and in which buckets: the same on every rank, before any communication."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from typing_extensions import assert_never

from fsdp_doctor.extract.agreement import ComparedPlan
from fsdp_doctor.extract.dtypes import OutputDtypes
from fsdp_doctor.extract.flat_transfers import FlatGather, FlatLayout, flat_gathers
from fsdp_doctor.extract.lora import LoraAdapter
from fsdp_doctor.extract.rank_groups import RankGroups
from fsdp_doctor.extract.sources import FlatUnit, Placed, Plain, Rows, ShardGroup, Source, specs
from fsdp_doctor.extract.transfers import LocalCopy, PackedGather, Redistribution, RowsGather, TensorTransfer

# Below it an all-gather of its own costs more than a copy out of a common one, of so many bytes.
SMALL_BYTES = 1 << 20
_PACK_BYTES = 32 << 20
# A bucket may be so much larger where the memory is there: more of them cost the host more than the links.
_MOST_TIMES = 4


@dataclass(kw_only=True, eq=False)
class Plan:
    """What one model and one call's arguments come to. Nothing in it is a tensor, so that it may be kept.

    all_sources: the adapters among them; sources: what is yielded. ranks: all that take part. groups: of ranks of which
    some may have other tensors than the others. merges: whether there are
    adapters, active ones or not, and they are to be merged; adapters, factors:
    which factors make up what is merged into a weight, and where they are. most_bytes: the device memory that
    buckets and the caller's last tensor may take together. ready: the places of the shards that a collective can read
    as they are.
    """

    all_sources: list[Source]
    sources: list[Source]
    merges: bool
    adapters: dict[str, list[LoraAdapter]]
    factors: dict[str, Source]
    dtypes: OutputDtypes
    device: torch.device
    ranks: tuple[int, ...]
    groups: RankGroups
    buckets: list[Bucket]
    most_bytes: int
    ready: frozenset[int]
    compared: ComparedPlan

    def num_promisable(self, first: int, wanted: int) -> int:
        """Of how many buckets from ``first`` on a rank may give its word at once: 1 at least, ``wanted`` at most.

        While the caller has the tensors of one, there is to be memory to launch any of the later ones.
        """
        beside, last_bytes = 0, self.buckets[first - 1].last_bytes if first else 0
        for count, (bucket, following) in enumerate(itertools.pairwise(self.buckets[first : first + wanted]), 1):
            beside = max(beside, last_bytes + bucket.nbytes)
            if beside + following.launched_bytes > self.most_bytes:
                return count
            last_bytes = bucket.last_bytes
        return wanted


def signature(
    sources: Sequence[Source], dtypes: OutputDtypes, settings: str, merged: Mapping[str, Sequence[LoraAdapter]]
) -> list[str]:
    """A line for each tensor, for each adapter that is merged, and for the settings: what all ranks must have alike."""
    lines = [settings]
    for source in sources:
        layout = _layout(source)
        lines += [f"{' = '.join(s.names)}: {list(s.shape)} {dtypes.of(s)} {layout}" for s in specs(source)]
    return lines + [
        f"{weight} += {one.scaling} * {one.b} @ {one.a}{', transposed' if one.transposed else ''}"
        for weight, adapters in merged.items()
        for one in adapters
    ]


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

    A bucket and the largest tensor, or two and a smaller tensor. Where the largest is larger than a
    bucket and most of the model is in tensors half as large at least, as in fused experts, one of them more: so that
    the next is loaded while the caller has the last.
    """
    sizes = _sizes(sources, dtypes)
    largest = max(sizes, default=0)
    most = max(bucket_bytes + largest, 2 * bucket_bytes + min(largest, bucket_bytes // 8))
    is_rule = largest > bucket_bytes and 2 * sum(size for size in sizes if 2 * size >= largest) > sum(sizes)
    return most + (largest if is_rule else 0)


def _sizes(sources: Sequence[Source], dtypes: OutputDtypes) -> list[int]:
    """Of the tensors, in bytes."""
    return [spec.numel * dtypes.of(spec).itemsize for source in sources for spec in specs(source)]


@dataclass
class Bucket:
    """What is loaded and gathered together.

    gathered_bytes: the device memory that it takes until its tensors are handed out; copied_bytes: what is copied of
    them at once. end: where the next bucket begins in the order of the tensors; small ones that come later are gathered
    with it, too. last_bytes: of the last tensor before that.
    """

    transfers: list[TensorTransfer] = field(default_factory=list)
    gathered_bytes: int = 0
    copied_bytes: int = 0
    end: int = 0
    last_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """The device memory that it takes at most."""
        return self.gathered_bytes + self.copied_bytes

    @functools.cached_property
    def launched_bytes(self) -> int:
        """The device memory without which its collectives cannot be launched."""
        return self.gathered_bytes - sum(transfer.opened_bytes for transfer in self.transfers)

    @functools.cached_property
    def rounding_bytes(self) -> int:
        """How much more an allocator may take for that: 512 bytes for each tensor, and 2 MiB for one of 10 MiB."""
        num_tensors = len(self.names()) + len(self.transfers)
        return 512 * num_tensors + (2 << 20) * min(num_tensors, self.launched_bytes // (10 << 20))

    @functools.cached_property
    def held_bytes(self) -> int:
        """The device memory that it has from then on, until its tensors are handed out."""
        return sum(one.nbytes - one.collecting_bytes - one.opened_bytes for one in self.transfers)

    @functools.cached_property
    def units(self) -> frozenset[int]:
        """The FSDP1 units of which it gathers a part, by their order."""
        return frozenset(transfer.unit.order for transfer in self.transfers if isinstance(transfer, FlatGather))

    def names(self) -> list[str]:
        """The first name of each tensor of which it has a part."""
        return [name for transfer in self.transfers for name in transfer.names()]


def buckets(
    sources: Sequence[Source], dtypes: OutputDtypes, bucket_bytes: int, extra_bytes: Mapping[str, int]
) -> Iterator[Bucket]:
    """Each takes ``bucket_bytes`` at most, unless one tensor alone takes more; the last ones take less.

    Where two larger ones and a tensor fit into ``most_bytes`` they are larger: what the largest tensor needs is there
    anyway.

    extra_bytes: what is needed beside the tensor of that name while it is gathered.
    """
    parts = list(_parts(sources, dtypes, bucket_bytes, extra_bytes))
    most = most_bytes(sources, dtypes, bucket_bytes)
    sizes = _sizes(sources, dtypes)
    usual = max((size for size in sizes if size <= bucket_bytes), default=0)
    larger_bytes = min((most - max(usual, bucket_bytes // 8)) // 2, _MOST_TIMES * bucket_bytes)
    limit = bucket_bytes
    left = sum(nbytes for _, _, nbytes in parts)
    bucket, rows, end = Bucket(), _RowsOfABucket(dtypes), 0
    for order, part, nbytes in parts:
        copied = part.copied_bytes if isinstance(part, TensorTransfer) else 0
        # Nothing runs beside the last gather.
        longest = min(limit, max(left // 2, bucket_bytes // 4))
        if bucket.nbytes and bucket.gathered_bytes + nbytes + max(bucket.copied_bytes, copied) > longest:
            yield _complete(bucket, rows, max(order, end), sizes)
            bucket, rows = Bucket(), _RowsOfABucket(dtypes)
            # The caller has the tensor before it, and the bucket before that may be gone.
            limit = max(bucket_bytes, min(larger_bytes, most - sizes[order - 1]))
        # A unit of FSDP1 may go on in the next bucket.
        end = order + (len(part.unit.source.spans) if isinstance(part, FlatGather) else 1)
        bucket.gathered_bytes += nbytes
        bucket.copied_bytes = max(bucket.copied_bytes, copied)
        left -= nbytes
        if isinstance(part, TensorTransfer):
            bucket.transfers.append(part)
        else:
            rows.add(order, part)
    last = _complete(bucket, rows, len(sizes), sizes)
    if last.transfers:
        yield last


class _RowsOfABucket:
    """The tensors of a bucket that are sharded by rows: those of one shard group and one dtype are one transfer."""

    def __init__(self, dtypes: OutputDtypes) -> None:
        self._dtypes = dtypes
        self._found: dict[tuple[tuple[int, ...], torch.dtype], tuple[list[int], list[Rows]]] = {}

    def add(self, order: int, source: Rows) -> None:
        key = source.shard_group.ranks, self._dtypes.of(source.spec)
        orders, sources = self._found.setdefault(key, ([], []))
        orders.append(order)
        sources.append(source)

    def transfers(self) -> Iterator[TensorTransfer]:
        for (_, dtype), (orders, sources) in self._found.items():
            yield RowsGather(orders, sources, dtype)


def _complete(bucket: Bucket, rows: _RowsOfABucket, end: int, sizes: Sequence[int]) -> Bucket:
    bucket.transfers += rows.transfers()
    bucket.end, bucket.last_bytes = end, sizes[end - 1] if end else 0
    return bucket


def _nbytes(source: Rows, dtype: torch.dtype) -> int:
    return source.chunk * source.shard_group.size * dtype.itemsize


def _parts(
    sources: Sequence[Source], dtypes: OutputDtypes, bucket_bytes: int, extra_bytes: Mapping[str, int]
) -> Iterator[tuple[int, TensorTransfer | Rows, int]]:
    """(order, a transfer or a tensor that is gathered with others, device memory that it takes)."""
    packs = {pack.order: (pack, nbytes) for pack, nbytes in _packs(sources, dtypes, bucket_bytes, extra_bytes)}
    packed = {order for pack, _ in packs.values() for order in pack.orders}
    most = most_bytes(sources, dtypes, bucket_bytes)
    order = last_bytes = 0
    for source in sources:
        if order in packs:
            yield order, *packs[order]
        elif isinstance(source, Rows) and order not in packed:
            yield order, source, _nbytes(source, dtypes.of(source.spec)) + extra_bytes.get(source.spec.names[0], 0)
        elif not isinstance(source, Rows):
            # The caller has the last tensor of those before, and what is left of the memory is there anyway.
            room = max(bucket_bytes, most - last_bytes)
            for transfer in _transfers(order, source, dtypes, bucket_bytes, room, extra_bytes):
                yield order, transfer, transfer.nbytes + sum(extra_bytes.get(name, 0) for name in transfer.names())
        order += len(specs(source))
        last = specs(source)[-1]
        last_bytes = last.numel * dtypes.of(last).itemsize


def _packs(
    sources: Sequence[Source], dtypes: OutputDtypes, bucket_bytes: int, extra_bytes: Mapping[str, int]
) -> Iterator[tuple[PackedGather, int]]:
    """(small tensors that share an all-gather, device memory that they take), from wherever in the model they are."""
    longest = min(_PACK_BYTES, bucket_bytes // 8)
    open_packs: dict[tuple[tuple[int, ...], torch.dtype], tuple[list[int], list[Rows], int]] = {}
    order = 0
    for source in sources:
        if isinstance(source, Rows):
            dtype = dtypes.of(source.spec)
            nbytes = 2 * _nbytes(source, dtype) + extra_bytes.get(source.spec.names[0], 0)
            if nbytes <= min(2 * SMALL_BYTES, longest):
                key = source.shard_group.ranks, dtype
                orders, rows, held = open_packs.get(key, ([], [], 0))
                if held + nbytes > longest:
                    yield PackedGather(orders, rows, dtype), held
                    orders, rows, held = [], [], 0
                orders.append(order)
                rows.append(source)
                open_packs[key] = orders, rows, held + nbytes
        order += len(specs(source))
    for (_, dtype), (orders, rows, held) in open_packs.items():
        yield PackedGather(orders, rows, dtype), held


def _transfers(
    order: int,
    source: Plain | Placed | FlatUnit,
    dtypes: OutputDtypes,
    bucket_bytes: int,
    room: int,
    merged: Collection[str],
) -> Iterator[TensorTransfer]:
    match source:
        case Plain():
            yield LocalCopy(order, source, dtypes.of(source.spec))
        case Placed():
            yield Redistribution(order, source, dtypes.of(source.spec))
        case FlatUnit():
            yield from flat_gathers(FlatLayout(order, source, dtypes), bucket_bytes, room, merged)
        case _:
            assert_never(source)
