"""Sums blocks of memory: on CUDA with one launch of a Triton kernel for all blocks, elsewhere with torch operations."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Collection, Sequence
from typing import Any

import torch

from fsdp_doctor.weights.fingerprints.keyed_sum import IndexedBlock, WordRun, divide_into_words, sum_elements, sum_words


class BlockSums:
    """Sums of blocks of memory on one device.

    ``add`` may be called repeatedly while the blocks stay at their addresses.
    """

    def __init__(self, blocks: Sequence[IndexedBlock], device: torch.device) -> None:
        pieces = [piece for block in blocks for piece in divide_into_words(block)]
        self._runs = [piece for piece in pieces if isinstance(piece, WordRun)]
        self._grids = [piece for piece in pieces if isinstance(piece, IndexedBlock)]
        self._device = device
        self._table: Any = None
        if device.type == "cuda" and _has_triton():
            from fsdp_doctor.weights.fingerprints import sum_kernels

            self._table = sum_kernels.SumTable(self._runs, self._grids, device)

    def reads_only(self, storages: Collection[int]) -> bool:
        """Returns whether all memory that is read lies in the storages at these addresses, so that no copy is read."""
        read = [*(run.words for run in self._runs), *(grid.tensor for grid in self._grids)]
        return all(tensor.untyped_storage().data_ptr() in storages for tensor in read)

    def release_memory(self) -> bool:
        """Drops the references to the tensors.

        Returns whether the tensors' memory can still be summed, as long as others keep it.
        """
        self._runs, self._grids = [], []
        return self._table is not None

    def move(self, before: Sequence[tuple[int, int]], now: Sequence[tuple[int, int]]) -> bool:
        """Makes later sums read the tensors' new memory, after ``release_memory``. Returns False if that is impossible.

        before, now: for each tensor of the blocks, the address of its storage and the address of the tensor.
        """
        moved = {old: new for (old, _), (new, _) in zip(before, now, strict=True)}
        for (old, there), (new, here) in zip(before, now, strict=True):
            # Words that lay at a multiple of 16 bytes must do so again.
            if moved[old] != new or here - new != there - old or (new - old) % 16:
                return False
        self._table.move(moved)
        return True

    def add(self, into: torch.Tensor) -> None:
        """Adds each block's sum to the row with the block's number.

        into: a device tensor of shape (tensors, 2) and dtype int64.
        """
        if self._table is not None:
            # Triton launches on the current device, wherever the memory is.
            with torch.cuda.device(self._device):
                self._table.add(into)
            return
        for run in self._runs:
            into[run.number] += sum_words(run.words, run.first)
        for grid in self._grids:
            into[grid.number] += sum_elements(grid)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
