"""Memory whose elements have a place in a tensor, and its sum.

On CUDA the sum is a Triton kernel, for all blocks at once; elsewhere, and where there is no Triton, it is made of torch
operations. The result is the same, bit for bit.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fsdp_doctor.fingerprints.keyed_sum import sum_of_elements, sum_of_words

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(slots=True, eq=False)
class IndexedBlock:
    """Contiguous memory of a tensor's elements.

    number: of the tensor, among those that are summed together. tensor: of any shape and dtype. An element with the
    coordinates ``c`` among ``sizes`` is number ``base + sum(c * stride)`` of the whole tensor in row-major order.
    """

    number: int
    tensor: torch.Tensor
    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(slots=True, eq=False)
class WordRun:
    """Words that follow one another: int32, 1-D; the index of the first."""

    number: int
    words: torch.Tensor
    first: int


@dataclass(slots=True, eq=False)
class ElementGrid:
    """Elements of 1, 2 or 4 bytes, as integers, 1-D, each with its place as in :class:`IndexedBlock`."""

    number: int
    elements: torch.Tensor
    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def range_block(number: int, tensor: torch.Tensor, first: int) -> IndexedBlock:
    """Elements that follow one another in the whole tensor too, the first of them number ``first``."""
    return IndexedBlock(number, tensor, first, (tensor.numel(),), (1,))


def grid_block(number: int, tensor: torch.Tensor, offsets: Sequence[int], strides: Sequence[int]) -> IndexedBlock:
    """A part of the tensor that begins at ``offsets``. strides: how far two neighbours along each dim are apart."""
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return IndexedBlock(number, tensor, base, tuple(tensor.shape), tuple(strides))


def add_sums(blocks: Sequence[IndexedBlock], into: torch.Tensor) -> None:
    """Adds the blocks' sums to the rows of their numbers. into: (tensors, 2), int64, on the blocks' device."""
    runs: list[WordRun] = []
    grids: list[ElementGrid] = []
    for block in blocks:
        for part in _in_words(block):
            if isinstance(part, WordRun):
                runs.append(part)
            else:
                grids.append(part)
    if into.device.type == "cuda" and _has_triton():
        from fsdp_doctor.fingerprints import sum_kernels

        # Triton launches on the current device, wherever the memory is.
        with torch.cuda.device(into.device):
            sum_kernels.add_words(runs, into)
            sum_kernels.add_elements(grids, into)
        return
    for run in runs:
        into[run.number] += sum_of_words(run.words, run.first)
    for grid in grids:
        into[grid.number] += sum_of_elements(grid.elements, grid.base, grid.sizes, grid.strides)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _in_words(block: IndexedBlock) -> Iterator[WordRun | ElementGrid]:
    """The block in the largest pieces of 4 bytes at most that its place and its memory allow."""
    if not block.tensor.numel():
        return
    flat, base, sizes, strides = _integers(block)
    sizes, strides = _merged(sizes, strides)
    if len(sizes) == 1 and strides[0] == 1:
        yield from _run(block.number, flat, base)
        return
    per_word = 4 // flat.element_size()
    aligned = flat.data_ptr() % 4 == 0 and base % per_word == 0 and sizes[-1] % per_word == 0
    if per_word > 1 and aligned and strides[-1] == 1 and all(stride % per_word == 0 for stride in strides[:-1]):
        flat, base = flat.view(torch.int32), base // per_word
        sizes = (*sizes[:-1], sizes[-1] // per_word)
        strides = (*(stride // per_word for stride in strides[:-1]), 1)
    yield ElementGrid(block.number, flat, base, sizes, strides)


def _integers(block: IndexedBlock) -> tuple[torch.Tensor, int, tuple[int, ...], tuple[int, ...]]:
    """The block as integers of at most 4 bytes; of a longer element each 4 bytes count as one."""
    # A conjugate view has its values nowhere yet.
    flat = block.tensor.resolve_conj().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    per_element = max(block.tensor.element_size() // 4, 1)
    flat = flat.view(_INTEGERS[min(block.tensor.element_size(), 4)])
    if per_element == 1:
        return flat, block.base, block.sizes, block.strides
    strides = (*(stride * per_element for stride in block.strides), 1)
    return flat, block.base * per_element, (*block.sizes, per_element), strides


def _merged(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dims along which the elements follow one another as one; none of length one."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    merged = merged or [(1, 1)]
    return tuple(size for size, _ in merged), tuple(stride for _, stride in merged)


def _run(number: int, flat: torch.Tensor, base: int) -> Iterator[WordRun | ElementGrid]:
    """Whole words, and the elements before the first and after the last."""
    per_word = 4 // flat.element_size()
    head = min(-base % per_word, flat.numel())
    length = (flat.numel() - head) // per_word * per_word
    if length:
        words = flat[head : head + length]
        # torch has no words that begin in the middle of one of memory's.
        words = words.clone() if words.data_ptr() % 4 else words
        yield WordRun(number, words.view(torch.int32), (base + head) // per_word)
    for begin, end in ((0, head), (head + length, flat.numel())):
        if begin < end:
            yield ElementGrid(number, flat[begin:end], base + begin, (end - begin,), (1,))
