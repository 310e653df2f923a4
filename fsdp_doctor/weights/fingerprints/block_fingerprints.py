"""Fingerprints of blocks of memory whose places in their tensors are known, such as the blocks of a file.

A fingerprint has two sums, called lanes, see ``keyed_sum``. This module imports torch, but not torch.distributed, whose
import takes half as long as that of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from fsdp_doctor.weights.fingerprints.block_sums import BlockSums
from fsdp_doctor.weights.fingerprints.fingerprint_set import (
    Fingerprints,
    TensorFingerprint,
    add_fingerprint,
    reduce_to_lanes,
)
from fsdp_doctor.weights.fingerprints.keyed_sum import IndexedBlock, make_grid_block
from fsdp_doctor.weights.fsdp.dtypes import name_dtype
from fsdp_doctor.weights.fsdp.strides import compute_row_major_strides

# Limit for the copies that are kept until they are summed.
_MOST_KEPT_BYTES = 64 << 20

_Entry: TypeAlias = tuple[str, TensorFingerprint, list[IndexedBlock]]
"""(name, the fingerprint with zero as its lanes, the summed tensor or part)."""


class _SumLaunch:
    """Sums of tensors on one device, in one launch. Each ``start`` sums the present values of the same memory.

    names: the tensors' names.
    parts: the part of each tensor; its lanes are zero.
    rows: for each tensor, both lanes and the number of elements that were summed.
    """

    def __init__(self, entries: Sequence[_Entry], device: torch.device) -> None:
        self.names = [name for name, _, _ in entries]
        self.parts = [part for _, part, _ in entries]
        for number, (_, _, blocks) in enumerate(entries):
            for block in blocks:
                block.number = number
        begin = [(0, 0, part.num_summed) for part in self.parts]
        self._begin = torch.tensor(begin, dtype=torch.int64, device="cpu").view(-1, 3).to(device)
        self.rows = torch.empty_like(self._begin)
        self._sums: BlockSums | None = BlockSums([block for _, _, blocks in entries for block in blocks], device)

    def start(self) -> None:
        assert self._sums is not None
        self.rows.copy_(self._begin)
        self._sums.add(self.rows[:, :2])

    def release_unless(self, kept: Collection[int]) -> bool:
        """Drops the table of addresses, unless all memory that it lists lies in the storages at the addresses ``kept``.

        Returns whether the table is kept.
        """
        if self._sums is not None and not self._sums.reads_only(kept):
            self._sums = None
        return self._sums is not None


class FingerprintSumsOfBlocks:
    """Sums blocks as they come; :meth:`fingerprints` returns the sums.

    repeats: whether :meth:`repeat` will be called; in this case a block may be changed but must not be freed.
    """

    def __init__(self, *, repeats: bool = False) -> None:
        self._sums: dict[str, TensorFingerprint] = {}
        self._waiting: list[_Entry] = []
        self._launches: list[_SumLaunch] = []
        self._copied_bytes = 0
        self._repeats = repeats
        # Addresses of the storages of what was added.
        self._storages: set[int] = set()
        self._same_tensor: list[list[str]] = []

    def add_blocks(
        self, name: str, part: TensorFingerprint, blocks: list[IndexedBlock], *, memory: torch.Tensor | None = None
    ) -> None:
        """Adds blocks to be summed at the next :meth:`flush`; until then their memory must not change.

        part: the part of the tensor, with zero as its lanes.
        memory: memory that the caller keeps in any case. 64 MiB of blocks outside this memory cause a flush.
        """
        storage = memory.untyped_storage().data_ptr() if memory is not None else None
        if storage is not None:
            self._storages.add(storage)
        self._waiting.append((name, part, blocks))
        self._copied_bytes += sum(b.tensor.nbytes for b in blocks if b.tensor.untyped_storage().data_ptr() != storage)
        if self._copied_bytes >= _MOST_KEPT_BYTES:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Launches the sums of all added tensors, without waiting for the device."""
        by_device: dict[torch.device, list[_Entry]] = {}
        device = torch.device("cpu")
        for entry in self._waiting:
            device = entry[2][0].tensor.device if entry[2] else device
            by_device.setdefault(device, []).append(entry)
        for device, entries in by_device.items():
            launch = _SumLaunch(entries, device)
            launch.start()
            self._repeats = launch.release_unless(self._storages if self._repeats else ()) and self._repeats
            self._launches.append(launch)
        self._waiting, self._copied_bytes = [], 0

    @torch.no_grad()
    def repeat(self) -> bool:
        """Sums the present values of the same memory again.

        Returns False, without summing, if earlier sums read copies.
        """
        for launch in self._launches if self._repeats else ():
            launch.start()
        return self._repeats

    def rows(self, device: torch.device) -> torch.Tensor:
        """Returns for each added name, in order, both lanes and the number of summed elements: int64, on the device."""
        if len(self._launches) == 1:
            return self._launches[0].rows.to(device)
        empty = torch.empty(0, 3, dtype=torch.int64, device=device)
        return torch.cat([empty, *(launch.rows.to(device) for launch in self._launches)])

    def named_parts(self) -> list[tuple[str, TensorFingerprint]]:
        """Returns the name of each row, and the part that was summed, with zero as its lanes."""
        return [pair for launch in self._launches for pair in zip(launch.names, launch.parts, strict=True)]

    def fingerprints(self) -> Fingerprints:
        """Returns the fingerprints of all added tensors.

        Waits for the device. Raises FingerprintError if parts of one tensor overlap, or differ in shape or dtype.
        """
        self.flush()
        for launch in self._launches:
            for name, part, row in zip(launch.names, launch.parts, launch.rows.tolist(), strict=True):
                add_fingerprint(self._sums, name, replace(part, lanes=reduce_to_lanes(row[:2])))
        self._launches = []
        return add_ties(dict(self._sums), self._same_tensor)


def add_ties(tensors: Mapping[str, TensorFingerprint], groups: Iterable[Sequence[str]]) -> Fingerprints:
    """Returns the fingerprints; the names of each of ``groups`` are marked as tied if their fingerprints are equal."""
    tied = tuple(tuple(names) for names in groups if len(names) > 1 and len({tensors[name] for name in names}) == 1)
    return Fingerprints(tensors, tied)


def make_unsummed(dtype: torch.dtype, shape: Sequence[int], blocks: Sequence[IndexedBlock]) -> TensorFingerprint:
    """Makes the fingerprint of the blocks before they are summed: its lanes are zero."""
    filled = [block for block in blocks if block.tensor.numel()]
    first = min((block.base for block in filled), default=0)
    num_summed = sum(block.tensor.numel() for block in filled)
    return TensorFingerprint(name_dtype(dtype), tuple(shape), first, num_summed, (0, 0))


def swap_halves(part: torch.Tensor, offsets: Sequence[int], shape: Sequence[int], dim: int) -> Iterator[IndexedBlock]:
    """Divides a block at the middle of ``dim`` and gives each half the indices of the other half.

    Yields nothing if the length of ``dim`` is odd.
    """
    if dim >= len(shape) or shape[dim] % 2:
        return
    half = shape[dim] // 2
    inside = min(max(half - offsets[dim], 0), part.shape[dim])
    for begin, length, moved in ((0, inside, half), (inside, part.shape[dim] - inside, -half)):
        if length:
            target = list(offsets)
            target[dim] += begin + moved
            yield make_grid_block(
                0, part.narrow(dim, begin, length).contiguous(), target, compute_row_major_strides(shape)
            )
