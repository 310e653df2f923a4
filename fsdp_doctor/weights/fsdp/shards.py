"""Computes, from the placements alone, the part of a tensor that a rank holds."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch.distributed.tensor import Placement, Replicate

from fsdp_doctor.weights.fsdp import private

Slices: TypeAlias = tuple[slice, ...]
_Runs: TypeAlias = tuple[range, ...]


class LayoutError(RuntimeError):
    """Error for shards that do not fit their placements, and for placements that are not supported."""


class Stretches(NamedTuple):
    """Elements of a flattened tensor: ``rows`` rows of ``length`` elements, which begin at ``first``, ``first + step``,
    etc.
    """

    first: int
    length: int
    step: int
    rows: int

    def convert_to_bytes(self, begin: int, itemsize: int) -> Stretches:
        """Returns the same stretches in bytes, for a tensor whose first byte is at ``begin``."""
        return Stretches(begin + self.first * itemsize, self.length * itemsize, self.step * itemsize, self.rows)


@dataclass(frozen=True)
class LocalPart:
    """Part of a tensor that one rank holds.

    runs: for each dim of the tensor, the ranges of indices that the rank holds, in the order of its shard.
    """

    runs: tuple[_Runs, ...]

    @classmethod
    def from_slices(cls, slices: Slices) -> LocalPart:
        return cls(tuple((range(part.start, part.stop),) for part in slices))

    @functools.cached_property
    def shape(self) -> torch.Size:
        return torch.Size(sum(map(len, runs)) for runs in self.runs)

    def read(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the rank's shard of the full tensor: a view if it is one block, otherwise a copy."""
        blocks = list(self.list_blocks())
        if len(blocks) == 1:
            return full[blocks[0][0]]
        shard = full.new_empty(self.shape)
        for whole, own in blocks:
            shard[own] = full[whole]
        return shard

    def write(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        """Writes the rank's shard, of any shape with as many elements, into its place in the full tensor."""
        shard = shard.view(self.shape)
        for whole, own in self.list_blocks():
            full[whole] = shard[own]

    def list_stretches(self, shape: Sequence[int]) -> Iterator[Stretches]:
        """Yields the shard's stretches in the flattened tensor of this shape, in the shard's order."""
        last = max((dim for dim, runs in enumerate(self.runs) if runs != (range(shape[dim]),)), default=0)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(last + 1)]
        columns = self.runs[last] if self.runs else (range(1),)
        rows = self.runs[last - 1] if last else (range(1),)
        if len(columns) > 1:
            rows = tuple(range(index, index + 1) for index in itertools.chain(*rows))
        for place in itertools.product(*(itertools.chain(*runs) for runs in self.runs[: max(last - 1, 0)])):
            begin = sum(index * stride for index, stride in zip(place, strides, strict=False))
            for row, column in itertools.product(rows, columns):
                first = begin + row.start * strides[last - 1] + column.start * strides[last]
                yield Stretches(first, len(column) * strides[last], strides[last - 1], len(row))

    def list_blocks(self) -> Iterator[tuple[Slices, Slices]]:
        """Yields (slices of the tensor, slices of the shard) for each block of the shard."""
        for block in itertools.product(*map(_place_runs, self.runs)):
            yield tuple(whole for whole, _ in block), tuple(own for _, own in block)


def compute_part(rank: int, shape: Sequence[int], mesh: torch.Tensor, placements: Sequence[Placement]) -> LocalPart:
    """Computes the part of a tensor of ``shape`` that a rank holds; the part is empty if the rank is not in the mesh.

    mesh: the ranks, in the form of ``DeviceMesh.mesh``. The dims of the mesh are applied from the first to the last;
        each divides the parts that the previous dims left, like torch.chunk.

    Raises LayoutError for a placement that is neither replicated nor sharded.
    """
    found = (mesh == rank).nonzero()
    if not len(found):
        return LocalPart(tuple((range(0),) for _ in shape))
    runs: list[_Runs] = [(range(length),) for length in shape]
    for size, place, placement in zip(mesh.shape, found[0].tolist(), placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        stretches = private.count_interleaved(placement)
        if stretches is None:
            raise LayoutError(f"a tensor that is placed as {placement} is not divided into shards")
        dim = placement.dim  # type: ignore[attr-defined]
        cut = (
            _choose_chunk(stretch, size, place)
            for stretch in (_choose_chunk(runs[dim], stretches, i) for i in range(stretches))
        )
        runs[dim] = _join(itertools.chain.from_iterable(cut))
    return LocalPart(tuple(runs))


def _choose_chunk(runs: _Runs, count: int, index: int) -> _Runs:
    """Returns chunk ``index`` of the indices, divided into ``count`` chunks like torch.chunk; the last may be short or
    empty.
    """
    length = -(-sum(map(len, runs)) // count)
    begin, end = index * length, (index + 1) * length
    found = []
    for run in runs:
        found.append(run[max(begin, 0) : max(end, 0)])
        begin, end = begin - len(run), end - len(run)
    return tuple(found)


def _join(runs: Iterator[range]) -> _Runs:
    """Joins neighbouring runs and drops empty ones; returns one empty run if none is left."""
    joined: list[range] = []
    for run in filter(len, runs):
        if joined and joined[-1].stop == run.start:
            joined[-1] = range(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return tuple(joined) or (range(0),)


def _place_runs(runs: _Runs) -> Iterator[tuple[slice, slice]]:
    begin = 0
    for run in runs:
        yield slice(run.start, run.stop), slice(begin, begin + len(run))
        begin += len(run)
