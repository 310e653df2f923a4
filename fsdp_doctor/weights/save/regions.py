"""Places of a shard's elements in the bytes of a tensor: ranges of a file, in the order of the shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from fsdp_doctor.weights.extract.local import ShardPlace
from fsdp_doctor.weights.fingerprints.summing import divide_shard_into_parts
from fsdp_doctor.weights.fsdp.shards import LocalPart, Stretches
from fsdp_doctor.weights.fsdp.strides import compute_row_major_strides


class FileRange(NamedTuple):
    offset: int
    nbytes: int


def list_blocks(
    tensor: torch.Tensor, shape: Sequence[int], place: ShardPlace
) -> Iterator[tuple[torch.Tensor, Iterable[Stretches]]]:
    """Divides a shard into 1-D blocks, and yields each with its stretches of the flattened tensor of ``shape``."""
    if place.offset is None:
        yield tensor.reshape(-1), place.held_part(shape).list_stretches(shape)
    elif place.stride == compute_row_major_strides(shape):
        yield tensor.reshape(-1), [Stretches(place.offset, tensor.numel(), 0, 1)]
    else:
        for part, offsets in divide_shard_into_parts(tensor, shape, place):
            slices = tuple(slice(begin, begin + length) for begin, length in zip(offsets, part.shape, strict=True))
            yield part.reshape(-1), LocalPart.from_slices(slices).list_stretches(shape)


def divide_into_chunks(stretches: Iterable[Stretches], most_bytes: int) -> Iterator[list[FileRange]]:
    """Divides stretches, given in bytes, into lists of ranges; each list but the last has ``most_bytes`` in total."""
    ranges: list[FileRange] = []
    held = 0
    for stretch in stretches:
        for row in range(stretch.rows):
            offset, left = stretch.first + row * stretch.step, stretch.length
            while left:
                nbytes = min(left, most_bytes - held)
                ranges.append(FileRange(offset, nbytes))
                offset, left, held = offset + nbytes, left - nbytes, held + nbytes
                if held == most_bytes:
                    yield ranges
                    ranges, held = [], 0
    if ranges:
        yield ranges
