"""What is yielded, in which order, and in which buckets: the same on every rank, before any communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from typing_extensions import assert_never

from fsdp_doctor.extract.dtypes import OutputDtypes
from fsdp_doctor.extract.sources import FlatUnit, Placed, Plain, Rows, ShardGroup, Source, specs
from fsdp_doctor.extract.transfers import (
    FlatGather,
    InPlaceGather,
    LocalCopy,
    PackedGather,
    Redistribution,
    TensorTransfer,
    UnitOutputs,
    flat_gathers,
)

# Below it an all-gather of its own costs more than a copy out of a common one.
_SMALL_BYTES = 1 << 20

# By the ranks of their shard group and their dtype: (their places in the order, the tensors).
_SmallTensors: TypeAlias = dict[tuple[tuple[int, ...], torch.dtype], tuple[list[int], list[Rows]]]


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
            return str(source.tensor.placements)
        case FlatUnit():
            return f"in a flat parameter of {source.shard_group.size} shards of {source.local.numel()}"
        case _:
            assert_never(source)


def shard_groups(sources: Sequence[Source]) -> list[ShardGroup]:
    found = {source.shard_group.ranks: source.shard_group for source in sources if not isinstance(source, Plain)}
    return list(found.values())


@dataclass
class Bucket:
    """What is loaded and gathered together. nbytes: the device memory that it takes at most."""

    transfers: list[TensorTransfer] = field(default_factory=list)
    nbytes: int = 0

    @property
    def units(self) -> set[UnitOutputs]:
        """The FSDP1 units of which it gathers a part."""
        return {transfer.unit for transfer in self.transfers if isinstance(transfer, FlatGather)}

    @property
    def is_gathered(self) -> bool:
        return any(transfer.shard_group is not None for transfer in self.transfers)

    def names(self) -> list[str]:
        """The first name of each tensor of which it has a part."""
        return [name for transfer in self.transfers for name in transfer.names()]


def buckets(
    sources: Sequence[Source], dtypes: OutputDtypes, bucket_bytes: int, extra_bytes: Mapping[str, int]
) -> Iterator[Bucket]:
    """Each takes ``bucket_bytes`` at most, unless one tensor alone takes more.

    extra_bytes: what is needed beside the tensor of that name while it is gathered.
    """
    bucket = Bucket()
    small: _SmallTensors = {}
    for order, part, nbytes in _parts(sources, dtypes, bucket_bytes, extra_bytes):
        if bucket.nbytes and bucket.nbytes + nbytes > bucket_bytes:
            yield _with_small_tensors(bucket, small)
            bucket, small = Bucket(), {}
        bucket.nbytes += nbytes
        if isinstance(part, TensorTransfer):
            bucket.transfers.append(part)
        else:
            orders, rows = small.setdefault((part.shard_group.ranks, dtypes.of(part.spec)), ([], []))
            orders.append(order)
            rows.append(part)
    if bucket.transfers or small:
        yield _with_small_tensors(bucket, small)


def _with_small_tensors(bucket: Bucket, small: _SmallTensors) -> Bucket:
    """The whole bucket: its small tensors of one shard group and one dtype share an all-gather."""
    bucket.transfers += [PackedGather(orders, rows, dtype) for (_, dtype), (orders, rows) in small.items()]
    return bucket


def _parts(
    sources: Sequence[Source], dtypes: OutputDtypes, bucket_bytes: int, extra_bytes: Mapping[str, int]
) -> Iterator[tuple[int, TensorTransfer | Rows, int]]:
    """(order, a transfer or a tensor that is to share one, device memory that it takes)."""
    order = 0
    for source in sources:
        if isinstance(source, Rows):
            dtype = dtypes.of(source.spec)
            nbytes = source.chunk * source.shard_group.size * dtype.itemsize
            extra = extra_bytes.get(source.spec.names[0], 0) if extra_bytes else 0
            if nbytes <= _SMALL_BYTES:
                yield order, source, 2 * nbytes + extra
            else:
                yield order, InPlaceGather(order, source, dtype), nbytes + extra
            order += 1
            continue
        for transfer in _transfers(order, source, dtypes, bucket_bytes):
            yield order, transfer, transfer.nbytes + sum(extra_bytes.get(name, 0) for name in transfer.names())
        order += len(specs(source))


def _transfers(
    order: int, source: Plain | Placed | FlatUnit, dtypes: OutputDtypes, bucket_bytes: int
) -> Iterator[TensorTransfer]:
    match source:
        case Plain():
            yield LocalCopy(order, source, dtypes.of(source.spec))
        case Placed():
            yield Redistribution(order, source, dtypes.of(source.spec))
        case FlatUnit():
            yield from flat_gathers(UnitOutputs(order, source, dtypes), bucket_bytes)
        case _:
            assert_never(source)
