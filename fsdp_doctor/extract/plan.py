"""What is yielded, in which order, and in which buckets: the same on every rank, before any communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fsdp_doctor.extract.sources import Placed, Plain, Rows, Source, Team, Unit, entries
from fsdp_doctor.extract.steps import Assembly, Copied, Packed, Redistributed, Step, Strip, Whole, strips
from fsdp_doctor.extract.wire import Wire

# Below it an all-gather of its own costs more than a copy out of a common one.
_SMALL_BYTES = 1 << 20
# An FSDP1 unit is gathered into memory of its own and copied out of it, so in less of it at once.
_STRIPS = 4


def signature(sources: Sequence[Source], wire: Wire, settings: str) -> list[str]:
    """A line for each tensor and one for the settings: what all ranks must have alike."""
    lines = [settings]
    for source in sources:
        how = _how(source)
        for entry in entries(source):
            lines.append(f"{' = '.join(entry.names)}: {tuple(entry.shape)} {wire.of(entry)} {how}")
    return lines


def _how(source: Source) -> str:
    match source:
        case Plain():
            return "whole"
        case Rows():
            return f"in {source.team.size} shards of {source.chunk}"
        case Placed():
            return str(source.tensor.placements)
        case Unit():
            return f"in a flat parameter of {source.team.size} shards of {source.local.numel()}"


def teams(sources: Sequence[Source]) -> list[Team]:
    found = {source.team.ranks: source.team for source in sources if not isinstance(source, Plain)}
    return list(found.values())


@dataclass
class Bucket:
    """Steps that are carried together.

    nbytes: the device memory that they take at most. names: the first names of their tensors.
    """

    steps: list[Step] = field(default_factory=list)
    small: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[int, Rows]]] = field(default_factory=dict)
    nbytes: int = 0
    names: list[str] = field(default_factory=list)

    def closed(self) -> Bucket:
        """With its small tensors packed."""
        self.steps += [
            Packed([order for order, _ in pack], [source for _, source in pack], dtype)
            for (_, dtype), pack in self.small.items()
        ]
        self.small.clear()
        return self

    @property
    def assemblies(self) -> set[Assembly]:
        """The FSDP1 units of which it carries a part."""
        return {step.assembly for step in self.steps if isinstance(step, Strip)}

    @property
    def is_gathered(self) -> bool:
        return any(step.team is not None for step in self.steps)


def buckets(
    sources: Sequence[Source], wire: Wire, bucket_bytes: int, extra_bytes: Mapping[str, int]
) -> Iterator[Bucket]:
    """Each takes ``bucket_bytes`` at most, unless one tensor alone takes more.

    extra_bytes: what is held beside a tensor of that name while it is carried.
    """
    bucket = Bucket()
    order = 0
    for source in sources:
        for part in _parts(order, source, wire, bucket_bytes):
            names = [entry.names[0] for entry in entries(source)]
            nbytes = part.nbytes + sum(extra_bytes.get(name, 0) for name in names)
            if bucket.nbytes and bucket.nbytes + nbytes > bucket_bytes:
                yield bucket.closed()
                bucket = Bucket()
            bucket.nbytes += nbytes
            bucket.names += names
            if isinstance(part, Packed):
                assert isinstance(source, Rows)
                bucket.small.setdefault((source.team.ranks, wire.of(source.entry)), []).append((order, source))
            else:
                bucket.steps.append(part)
        order += len(entries(source))
    if bucket.nbytes or bucket.names:
        yield bucket.closed()


def _parts(order: int, source: Source, wire: Wire, bucket_bytes: int) -> list[Step]:
    match source:
        case Plain():
            return [Copied(order, source, wire.of(source.entry))]
        case Placed():
            return [Redistributed(order, source, wire.of(source.entry))]
        case Rows():
            dtype = wire.of(source.entry)
            if source.chunk * source.team.size * dtype.itemsize <= _SMALL_BYTES:
                return [Packed([order], [source], dtype)]
            return [Whole(order, source, dtype)]
        case Unit():
            return list(strips(Assembly(order, source, wire), bucket_bytes // _STRIPS))
