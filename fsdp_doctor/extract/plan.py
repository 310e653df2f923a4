"""What is yielded, in which order, and in which buckets: the same on every rank, before any communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fsdp_doctor.extract.dtypes import OutputDtypes
from fsdp_doctor.extract.sources import (
    FlatUnit,
    Placed,
    Plain,
    Rows,
    ShardGroup,
    Source,
    entries,
)
from fsdp_doctor.extract.steps import (
    Assembly,
    Copied,
    Packed,
    Redistributed,
    Step,
    Strip,
    Whole,
    strips,
)

# Below it an all-gather of its own costs more than a copy out of a common one.
_SMALL_BYTES = 1 << 20


def signature(sources: Sequence[Source], dtypes: OutputDtypes, settings: str) -> list[str]:
    """A line for each tensor and one for the settings: what all ranks must have alike."""
    lines = [settings]
    for source in sources:
        how = _how(source)
        lines += [f"{' = '.join(e.names)}: {list(e.shape)} {dtypes.of(e)} {how}" for e in entries(source)]
    return lines


def _how(source: Source) -> str:
    match source:
        case Plain():
            return "whole"
        case Rows():
            return f"in {source.shard_group.size} shards of {source.chunk}"
        case Placed():
            return str(source.tensor.placements)
        case FlatUnit():
            return f"in a flat parameter of {source.shard_group.size} shards of {source.local.numel()}"


def shard_groups(sources: Sequence[Source]) -> list[ShardGroup]:
    found = {source.shard_group.ranks: source.shard_group for source in sources if not isinstance(source, Plain)}
    return list(found.values())


@dataclass
class Bucket:
    """Steps that are carried together. nbytes: the device memory that they take at most."""

    steps: list[Step] = field(default_factory=list)
    nbytes: int = 0

    @property
    def assemblies(self) -> set[Assembly]:
        """The FSDP1 units of which it carries a part."""
        return {step.assembly for step in self.steps if isinstance(step, Strip)}

    @property
    def is_gathered(self) -> bool:
        return any(step.shard_group is not None for step in self.steps)

    def names(self) -> list[str]:
        """The first name of each tensor of which it carries something."""
        return [name for step in self.steps for name in step.names()]


def buckets(
    sources: Sequence[Source], dtypes: OutputDtypes, bucket_bytes: int, extra_bytes: Mapping[str, int]
) -> Iterator[Bucket]:
    """Each takes ``bucket_bytes`` at most, unless one tensor alone takes more.

    extra_bytes: what is held beside a tensor of that name while it is carried.
    """
    bucket = Bucket()
    small: dict[tuple[tuple[int, ...], torch.dtype], tuple[list[int], list[Rows]]] = {}
    for order, part, nbytes in _parts(sources, dtypes, bucket_bytes, extra_bytes):
        if bucket.nbytes and bucket.nbytes + nbytes > bucket_bytes:
            yield _closed(bucket, small)
            bucket, small = Bucket(), {}
        bucket.nbytes += nbytes
        if isinstance(part, Step):
            bucket.steps.append(part)
        else:
            orders, rows = small.setdefault((part.shard_group.ranks, dtypes.of(part.entry)), ([], []))
            orders.append(order)
            rows.append(part)
    if bucket.steps or small:
        yield _closed(bucket, small)


def _closed(
    bucket: Bucket, small: Mapping[tuple[tuple[int, ...], torch.dtype], tuple[list[int], list[Rows]]]
) -> Bucket:
    """With its small tensors, those of one shard_group and one dtype in one step."""
    bucket.steps += [Packed(orders, rows, dtype) for (_, dtype), (orders, rows) in small.items()]
    return bucket


def _parts(
    sources: Sequence[Source], dtypes: OutputDtypes, bucket_bytes: int, extra_bytes: Mapping[str, int]
) -> Iterator[tuple[int, Step | Rows, int]]:
    """(order, a step or a tensor that is to share one, device memory that it takes)."""
    order = 0
    for source in sources:
        if isinstance(source, Rows):
            dtype = dtypes.of(source.entry)
            nbytes = source.chunk * source.shard_group.size * dtype.itemsize
            extra = extra_bytes.get(source.entry.names[0], 0) if extra_bytes else 0
            if nbytes <= _SMALL_BYTES:
                yield order, source, 2 * nbytes + extra
            else:
                yield order, Whole(order, source, dtype), nbytes + extra
            order += 1
            continue
        for step in _steps(order, source, dtypes, bucket_bytes):
            yield order, step, step.nbytes + sum(extra_bytes.get(name, 0) for name in step.names())
        order += len(entries(source))


def _steps(order: int, source: Plain | Placed | FlatUnit, dtypes: OutputDtypes, bucket_bytes: int) -> Iterator[Step]:
    match source:
        case Plain():
            yield Copied(order, source, dtypes.of(source.entry))
        case Placed():
            yield Redistributed(order, source, dtypes.of(source.entry))
        case FlatUnit():
            yield from strips(Assembly(order, source, dtypes), bucket_bytes)
