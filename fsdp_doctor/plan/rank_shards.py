"""What one rank has of each FSDP unit: elements of its shard, as both FSDPs cut and pad them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_doctor.matrix.axes import Strategy
from fsdp_doctor.plan.model_shape import ModelShape, ShapedParameter, ShapedUnit


@dataclass(frozen=True, kw_only=True)
class UnitShard:
    """One unit on one rank, in elements.

    padded: of each tensor that holds a shard, as long on every rank. own: of each, what is this rank's part of it.
    full: of each tensor that a gather fills. originals: of each parameter, unsharded.
    """

    name: str
    padded: tuple[int, ...]
    own: tuple[int, ...]
    full: tuple[int, ...]
    originals: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RankShards:
    """All units of a model on one rank of a shard group."""

    root: UnitShard
    embedding: UnitShard | None
    layers: tuple[UnitShard, ...]
    ranks: int

    @property
    def units(self) -> tuple[UnitShard, ...]:
        return (self.root, *((self.embedding,) if self.embedding else ()), *self.layers)


def shards_of(shape: ModelShape, strategy: Strategy, *, rank: int, ranks: int) -> RankShards:
    """rank: within its shard group of so many ranks. FSDP1 has no unit for the embedding: it is in the root's."""
    if strategy == "fsdp2":
        embedding = _fsdp2_unit(shape.embedding, rank, ranks) if shape.embedding else None
        layers = tuple(_fsdp2_unit(unit, rank, ranks) for unit in shape.layers)
        return RankShards(root=_fsdp2_unit(shape.root, rank, ranks), embedding=embedding, layers=layers, ranks=ranks)
    of_embedding = shape.embedding.parameters if shape.embedding else ()
    root = ShapedUnit("root", (*of_embedding, *shape.root.parameters))
    whole = strategy == "fsdp1"
    return RankShards(
        root=_fsdp1_unit(root, rank, ranks, whole=whole),
        embedding=None,
        layers=tuple(_fsdp1_unit(unit, rank, ranks, whole=whole) for unit in shape.layers),
        ranks=ranks,
    )


def _fsdp2_unit(unit: ShapedUnit, rank: int, ranks: int) -> UnitShard:
    """Each parameter is cut along its first dimension into chunks of as many rows, of which the last are padded."""
    chunks = [_chunk(parameter, rank, ranks) for parameter in unit.parameters]
    return UnitShard(
        name=unit.name,
        padded=tuple(padded for padded, _ in chunks),
        own=tuple(own for _, own in chunks),
        full=tuple(padded * ranks for padded, _ in chunks),
        originals=tuple(parameter.numel for parameter in unit.parameters),
    )


def _chunk(parameter: ShapedParameter, rank: int, ranks: int) -> tuple[int, int]:
    """(elements of each rank's chunk with its padding, elements of this rank's)."""
    rows, *others = parameter.shape or (1,)
    a_row = math.prod(others)
    chunk = -(-rows // ranks)
    return chunk * a_row, max(0, min(chunk, rows - rank * chunk)) * a_row


def _fsdp1_unit(unit: ShapedUnit, rank: int, ranks: int, *, whole: bool) -> UnitShard:
    """One flat parameter, padded at its end. whole: the optimizer has it as one tensor, not as the originals."""
    chunk = -(-unit.numel // ranks)
    begin, end = rank * chunk, min((rank + 1) * chunk, unit.numel)
    parts: list[int] = []
    at = 0
    for parameter in unit.parameters:
        parts.append(max(0, min(end, at + parameter.numel) - max(begin, at)))
        at += parameter.numel
    return UnitShard(
        name=unit.name,
        padded=(chunk,),
        own=(chunk,) if whole else tuple(parts),
        full=(chunk * ranks,),
        originals=tuple(parameter.numel for parameter in unit.parameters),
    )
