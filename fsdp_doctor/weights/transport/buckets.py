"""Division of tensors into buckets, the same on every rank without communication."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from typing_extensions import assert_never

from fsdp_doctor.weights.transport.sources import FlatUnit, OutputDtypes, Placed, Plain, Rows, Source, list_specs
from fsdp_doctor.weights.transport.transfers import (
    FlatGather,
    FlatLayout,
    LocalCopy,
    PackedGather,
    Redistribution,
    RowsGather,
    TensorTransfer,
    divide_unit,
    sum_two_largest,
)

# Tensors smaller than this share an all-gather of at most _PACK_BYTES, since a collective for each would cost more than
# a copy of each out of the result.
SMALL_BYTES = 1 << 20
_PACK_BYTES = 32 << 20
# A bucket may be this many times larger if there is memory, since many small buckets cost the host more than the links.
_MOST_TIMES = 4


@dataclass
class Bucket:
    """Transfers that are loaded and gathered together.

    gathered_bytes: the device memory that the bucket takes until its tensors are yielded.
    copied_bytes: the largest ``copied_bytes`` of a transfer.
    end: the position, in the order of the tensors, at which the next bucket begins. A bucket may also gather small
        tensors after that position.
    last_bytes: the size of the last tensor before ``end``.
    early_bytes: the size of the gathered tensors after ``end``.
    """

    transfers: list[TensorTransfer] = field(default_factory=list)
    gathered_bytes: int = 0
    copied_bytes: int = 0
    end: int = 0
    last_bytes: int = 0
    early_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Largest device memory of the bucket, in bytes."""
        return self.gathered_bytes + self.copied_bytes

    @functools.cached_property
    def launched_bytes(self) -> int:
        """Device memory, in bytes, that is needed to launch the bucket's collectives."""
        return self.gathered_bytes - sum(transfer.opened_bytes for transfer in self.transfers)

    @functools.cached_property
    def rounding_bytes(self) -> int:
        """Bytes that an allocator may add by rounding: 512 for each tensor, and 2 MiB for each tensor of at least 10
        MiB.
        """
        num_tensors = len(self.list_names()) + len(self.transfers)
        return 512 * num_tensors + (2 << 20) * min(num_tensors, self.launched_bytes // (10 << 20))

    @functools.cached_property
    def held_bytes(self) -> int:
        """Device memory, in bytes, that the bucket holds after its collectives, until its tensors are yielded."""
        return sum(t.nbytes - t.collecting_bytes - t.opened_bytes for t in self.transfers)

    @functools.cached_property
    def begun_bytes(self) -> int:
        """Device memory, in bytes, of tensors that earlier buckets have gathered in part and this bucket continues."""
        return sum(transfer.begun_bytes for transfer in self.transfers if isinstance(transfer, FlatGather))

    def list_names(self) -> list[str]:
        """Lists the first name of each tensor that the bucket gathers, in whole or in part."""
        return [name for transfer in self.transfers for name in transfer.names]


class _OpenBucket:
    """Bucket that is being filled. Row-sharded tensors of one shard group and dtype become one transfer."""

    def __init__(self) -> None:
        self.bucket = Bucket()
        self._rows: dict[tuple[tuple[int, ...], torch.dtype], tuple[list[int], list[Rows]]] = {}

    def add_row(self, order: int, source: Rows, dtype: torch.dtype) -> None:
        orders, sources = self._rows.setdefault((source.shard_group.ranks, dtype), ([], []))
        orders.append(order)
        sources.append(source)

    def close(self, end: int, sizes: Sequence[int], early: set[int]) -> Bucket:
        """Completes the bucket.

        early: the positions of small tensors that were gathered and are not yielded yet; updated in place.
        """
        bucket = self.bucket
        early.update(*(transfer.orders for transfer in bucket.transfers if isinstance(transfer, PackedGather)))
        early.difference_update(range(end))
        bucket.early_bytes = sum(sizes[order] for order in early)
        bucket.transfers += [RowsGather(*rows, dtype) for (_, dtype), rows in self._rows.items()]
        bucket.end, bucket.last_bytes = end, sizes[end - 1] if end else 0
        return bucket


def count_most_bytes(sizes: Sequence[Sequence[int]], bucket_bytes: int) -> int:
    """Returns the device memory that buckets and the caller's last tensor may take together.

    The result is the largest of three sums: a bucket and the largest tensor; two buckets and an eighth of a bucket (or
    the largest tensor, if it is smaller than an eighth); an eighth of a bucket and two tensors that are consecutive or
    in one unit. If the largest tensor is larger than a bucket, and most of the model is in tensors of at least half
    this size (fused experts), the size of the largest tensor is added again. The next such tensor can then be loaded
    while the caller has the last one.

    sizes: the sizes of all tensors in bytes, in order; the tensors of an FSDP1 unit form one list, and every other
        tensor forms a separate list.
    """
    every = list(itertools.chain.from_iterable(sizes))
    largest = max(every, default=0)
    pairs = (sum_two_largest((*before[-1:], *unit)) for before, unit in itertools.pairwise([(), *sizes]))
    part = bucket_bytes // 8
    most = max(bucket_bytes + largest, 2 * bucket_bytes + min(largest, part), max(pairs, default=0) + part)
    return most + (largest if _is_mostly_large(every, bucket_bytes) else 0)


def _is_mostly_large(sizes: Sequence[int], bucket_bytes: int) -> bool:
    largest = max(sizes, default=0)
    return largest > bucket_bytes and 2 * sum(size for size in sizes if 2 * size >= largest) > sum(sizes)


@dataclass(frozen=True)
class Division:
    """Division of tensors into buckets.

    extra_bytes: by the first name of a tensor, additional memory that gathering it takes.
    """

    sources: Sequence[Source]
    dtypes: OutputDtypes
    bucket_bytes: int
    extra_bytes: Mapping[str, int] = field(default_factory=dict)

    @functools.cached_property
    def _sizes_by_source(self) -> list[list[int]]:
        return [
            [spec.numel * self.dtypes.choose(spec).itemsize for spec in list_specs(source)] for source in self.sources
        ]

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return list(itertools.chain.from_iterable(self._sizes_by_source))

    @functools.cached_property
    def most_bytes(self) -> int:
        return count_most_bytes(self._sizes_by_source, self.bucket_bytes)

    def make_buckets(self) -> Iterator[Bucket]:
        """Makes buckets of at most ``bucket_bytes`` each; a larger tensor has a separate bucket, and the last buckets
        are smaller.

        If two larger buckets and a tensor fit into ``most_bytes``, buckets are larger, because the largest tensor needs
        that memory in any case. A part of an FSDP1 unit is a separate bucket; the tensors that earlier parts began take
        memory in addition to it.
        """
        bucket_bytes, sizes = self.bucket_bytes, self._sizes
        parts = list(self._make_parts())
        usual = max((size for size in sizes if size <= bucket_bytes), default=0)
        larger_bytes = min((self.most_bytes - max(usual, bucket_bytes // 8)) // 2, _MOST_TIMES * bucket_bytes)
        if _is_mostly_large(sizes, bucket_bytes):
            # The next large tensor must fit together with a bucket and the small tensors that were gathered early.
            bucket_bytes -= min(sum(nbytes for _, nbytes in self._make_packs()) // 2, bucket_bytes // 4)
            larger_bytes = bucket_bytes
        limit = bucket_bytes
        left = sum(nbytes for _, _, nbytes in parts)
        filling, end = _OpenBucket(), 0
        early: set[int] = set()
        for order, part, nbytes in parts:
            bucket = filling.bucket
            copied = part.copied_bytes if isinstance(part, TensorTransfer) else 0
            # Nothing runs at the same time as the last gather.
            longest = min(limit, max(left // 2, bucket_bytes // 4))
            is_full = bucket.gathered_bytes + nbytes + max(bucket.copied_bytes, copied) > longest
            is_alone = any(isinstance(transfer, FlatGather) for transfer in (part, *bucket.transfers[-1:]))
            if bucket.nbytes and (is_full or is_alone):
                bucket = filling.close(max(order, end), sizes, early)
                yield bucket
                # The caller has the tensor before it, others wait, and the bucket before that may be gone.
                limit = min(max(bucket_bytes, larger_bytes), self.most_bytes - sizes[order - 1] - bucket.early_bytes)
                filling = _OpenBucket()
                bucket = filling.bucket
            # A unit of FSDP1 may go on in the next bucket.
            end = order + (len(part.unit.source.spans) if isinstance(part, FlatGather) else 1)
            bucket.gathered_bytes += nbytes
            bucket.copied_bytes = max(bucket.copied_bytes, copied)
            left -= nbytes
            if isinstance(part, TensorTransfer):
                bucket.transfers.append(part)
            else:
                filling.add_row(order, part, self.dtypes.choose(part.spec))
        last = filling.close(len(sizes), sizes, early)
        if last.transfers:
            yield last

    def _make_parts(self) -> Iterator[tuple[int, TensorTransfer | Rows, int]]:
        """Yields (position of the first tensor, a transfer or a tensor to gather with others, its device memory)."""
        packs = {pack.order: (pack, nbytes) for pack, nbytes in self._make_packs()}
        packed = {order for pack, _ in packs.values() for order in pack.orders}
        order = last_bytes = 0
        for source in self.sources:
            if order in packs:
                yield order, *packs[order]
            elif isinstance(source, Rows) and order not in packed:
                yield order, source, self._count_gathered_bytes(source) + self._count_extra_bytes(source.spec.names[:1])
            elif not isinstance(source, Rows):
                # The caller has the last tensor of those before, and what is left of the memory is there anyway.
                for transfer in self._make_transfers(order, source, last_bytes):
                    yield order, transfer, transfer.nbytes + self._count_extra_bytes(transfer.names)
            order += len(list_specs(source))
            last_bytes = self._sizes[order - 1] if order else 0

    def _make_packs(self) -> Iterator[tuple[PackedGather, int]]:
        """Yields (small tensors that share an all-gather, device memory that they take); they may be anywhere in the
        model.
        """
        longest = min(_PACK_BYTES, self.bucket_bytes // 8)
        open_packs: dict[tuple[tuple[int, ...], torch.dtype], tuple[list[int], list[Rows], int]] = {}
        order = 0
        for source in self.sources:
            if isinstance(source, Rows):
                dtype = self.dtypes.choose(source.spec)
                nbytes = 2 * self._count_gathered_bytes(source) + self._count_extra_bytes(source.spec.names[:1])
                if nbytes <= min(2 * SMALL_BYTES, longest):
                    key = source.shard_group.ranks, dtype
                    orders, rows, packed_bytes = open_packs.get(key, ([], [], 0))
                    if packed_bytes + nbytes > longest:
                        yield PackedGather(orders, rows, dtype), packed_bytes
                        orders, rows, packed_bytes = [], [], 0
                    orders.append(order)
                    rows.append(source)
                    open_packs[key] = orders, rows, packed_bytes + nbytes
            order += len(list_specs(source))
        for (_, dtype), (orders, rows, packed_bytes) in open_packs.items():
            yield PackedGather(orders, rows, dtype), packed_bytes

    def _make_transfers(
        self, order: int, source: Plain | Placed | FlatUnit, last_bytes: int
    ) -> Iterator[TensorTransfer]:
        match source:
            case Plain():
                yield LocalCopy(order, source, self.dtypes.choose(source.spec))
            case Placed():
                is_merged = source.spec.names[0] in self.extra_bytes
                yield Redistribution(order, source, self.dtypes.choose(source.spec), is_merged=is_merged)
            case FlatUnit():
                unit = FlatLayout(order, source, self.dtypes)
                yield from divide_unit(unit, self.bucket_bytes, self.most_bytes, last_bytes, self.extra_bytes.keys())
            case _:
                assert_never(source)

    def _count_gathered_bytes(self, source: Rows) -> int:
        return source.chunk * source.shard_group.size * self.dtypes.choose(source.spec).itemsize

    def _count_extra_bytes(self, names: Sequence[str]) -> int:
        return sum(self.extra_bytes.get(name, 0) for name in names)
