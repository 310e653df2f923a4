"""Keyed sum of a tensor's bytes, from which fingerprints are made, and which changes it detects.

The bytes of a tensor, in row-major order and little-endian, are read as words of 32 bits; the last word is padded with
zeros. The words are arranged in rows of 4096. With a 64-bit key for each row and for each column, one lane of the sum
is

    sum over all words of  row_key(word // 4096) * column_key(word % 4096) * word   modulo 2**64

There are two lanes with different keys; the second lane swaps the halves of each word first. The keys are odd numbers
from splitmix64. This has four consequences:

- A word that is divided (two bfloat16 on two ranks) is the sum of its parts. Every rank may sum its part in any order,
    and the sums of all ranks add up to the sum of the whole tensor, however it is divided.
- A change of one word is always detected, since odd keys have inverses.
- Any other change (a swap, a permutation, a transposition, values of another step) is missed with a probability of less
    than 2**-66 if the keys are regarded as random numbers, and typically 2**-110. In the weakest case all bits that
    differ are the highest bits of their words: only 33 bits of the key products count in one lane, and 49 in the other.
- Zeros add nothing, so a fingerprint also has the dtype, the shape, and the number of summed elements.

This is no cryptographic hash: the sum is linear and the keys are known, so two tensors with the same fingerprint can be
constructed. The sums of the same values in two dtypes are unrelated.

The sum in this module uses torch operations; ``sum_kernels`` computes the same sum, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

# Fingerprints of two versions of the sum cannot be compared.
VERSION = 1
ROW_WORDS = 4096

_GAMMA = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number, as are the next two
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_SHIFTS = (30, 27, 31)
# Limits of what is computed at once: on the CPU as much as its caches hold.
_MOST_ROWS = {"cpu": 64}
_MOST_ROWS_ELSEWHERE = 1024
_MOST_ELEMENTS = 1 << 19
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(slots=True, eq=False)
class IndexedBlock:
    """Contiguous memory whose elements have known indices in a tensor.

    number: the tensor's index among the tensors that are summed together.
    tensor: the block, of any shape and dtype. The element at the coordinates ``c`` within ``sizes`` is element ``base +
        sum(c * strides)`` of the whole tensor in row-major order.
    """

    number: int
    tensor: torch.Tensor
    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(slots=True, eq=False)
class WordRun:
    """Consecutive words of the tensor ``number``.

    words: a 1-D int32 tensor.
    first: the index of the first word.
    """

    number: int
    words: torch.Tensor
    first: int


def make_range_block(number: int, tensor: torch.Tensor, first: int) -> IndexedBlock:
    """Makes a block whose elements are consecutive in the whole tensor, from element ``first`` on."""
    return IndexedBlock(number, tensor, first, (tensor.numel(),), (1,))


def make_grid_block(number: int, tensor: torch.Tensor, offsets: Sequence[int], strides: Sequence[int]) -> IndexedBlock:
    """Makes a block with the tensor's dims that begins at ``offsets``.

    strides: for each dim, the distance between neighbours in the numbering of the whole tensor's elements.
    """
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return IndexedBlock(number, tensor, base, tuple(tensor.shape), tuple(strides))


def compute_keys(counters: torch.Tensor, family: int) -> torch.Tensor:
    """Computes splitmix64 of ``4 * counters + family`` and makes it odd. Input and output are int64, on any device."""
    mixed = (4 * counters + family + 1) * _GAMMA
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        mixed = mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))
        if factor is not None:
            mixed = mixed * factor
    return mixed | 1


@functools.lru_cache(maxsize=16)
def compute_column_keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the column keys of both lanes, int64."""
    columns = torch.arange(ROW_WORDS, device=device)
    return compute_keys(columns, 0), compute_keys(columns, 1)


def compute_row_keys(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return compute_keys(rows, 2), compute_keys(rows, 3)


def divide_into_words(block: IndexedBlock) -> Iterator[WordRun | IndexedBlock]:
    """Divides a block into runs of whole words and, where elements are not consecutive, blocks of integers of at most 4
    bytes.
    """
    if not block.tensor.numel():
        return
    flat, base, sizes, strides = _view_as_integers(block)
    sizes, strides = _merge_dims(sizes, strides)
    if len(sizes) == 1 and strides[0] == 1:
        yield from _run(block.number, flat, base)
        return
    per_word = 4 // flat.element_size()
    aligned = flat.data_ptr() % 4 == 0 and base % per_word == 0 and sizes[-1] % per_word == 0
    if per_word > 1 and aligned and strides[-1] == 1 and all(stride % per_word == 0 for stride in strides[:-1]):
        flat, base = flat.view(torch.int32), base // per_word
        sizes = (*sizes[:-1], sizes[-1] // per_word)
        strides = (*(stride // per_word for stride in strides[:-1]), 1)
    yield IndexedBlock(block.number, flat, base, sizes, strides)


def _view_as_integers(block: IndexedBlock) -> tuple[torch.Tensor, int, tuple[int, ...], tuple[int, ...]]:
    """Views a block as integers of at most 4 bytes; a longer element counts as several integers of 4 bytes."""
    # The values of a conjugate view are not in memory yet.
    flat = block.tensor.resolve_conj().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    per_element = max(block.tensor.element_size() // 4, 1)
    flat = flat.view(_INTEGERS[min(block.tensor.element_size(), 4)])
    if per_element == 1:
        return flat, block.base, block.sizes, block.strides
    strides = (*(stride * per_element for stride in block.strides), 1)
    return flat, block.base * per_element, (*block.sizes, per_element), strides


def _merge_dims(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Joins dims along which the elements are consecutive, and drops dims of length one."""
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


def _run(number: int, flat: torch.Tensor, base: int) -> Iterator[WordRun | IndexedBlock]:
    """Divides consecutive elements into a run of whole words and the incomplete words before and after it."""
    per_word = 4 // flat.element_size()
    head = min(-base % per_word, flat.numel())
    length = (flat.numel() - head) // per_word * per_word
    if length:
        words = flat[head : head + length]
        # torch requires that words are aligned in memory.
        words = words.clone() if words.data_ptr() % 4 else words
        yield WordRun(number, words.view(torch.int32), (base + head) // per_word)
    for begin, end in ((0, head), (head + length, flat.numel())):
        if begin < end:
            yield IndexedBlock(number, flat[begin:end], base + begin, (end - begin,), (1,))


def sum_words(words: torch.Tensor, first: int) -> torch.Tensor:
    """Sums consecutive words. Returns both lanes, int64.

    words: a 1-D int32 tensor.
    first: the index of the first word.
    """
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    column = first % ROW_WORDS
    most_rows = _MOST_ROWS.get(words.device.type, _MOST_ROWS_ELSEWHERE)
    most_rows = min(most_rows, -(-(column + words.numel()) // ROW_WORDS))
    rows = torch.empty(most_rows, ROW_WORDS, dtype=torch.int64, device=words.device)
    swapped = torch.empty_like(rows)
    while words.numel():
        part = words[: rows.numel() - column]
        num_rows = -(-(column + part.numel()) // ROW_WORDS)
        total += _sum_rows(part, first // ROW_WORDS, column, rows[:num_rows], swapped[:num_rows])
        words, first, column = words[part.numel() :], first + part.numel(), 0
    return total


def _sum_rows(words: torch.Tensor, row: int, column: int, rows: torch.Tensor, swapped: torch.Tensor) -> torch.Tensor:
    """Returns both lanes of the sum of ``words``. The contents of the buffers ``rows`` and ``swapped`` are overwritten.

    The buffers are reused because new buffers would cost page faults on the CPU.
    """
    flat = rows.view(-1)
    flat[:column], flat[column + words.numel() :] = 0, 0
    flat[column : column + words.numel()] = words
    rows &= 0xFFFFFFFF
    torch.bitwise_right_shift(rows, 16, out=swapped)
    one, two = compute_row_keys(torch.arange(row, row + len(rows), device=words.device))
    of_column_one, of_column_two = compute_column_keys(words.device)
    first_lane = _multiply(rows, of_column_one).mul_(one).sum()
    swapped |= rows.bitwise_and_(0xFFFF).mul_(1 << 16)
    return torch.stack([first_lane, _multiply(swapped, of_column_two).mul_(two).sum()])


def _multiply(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Multiplies a matrix by a vector of int64. torch.mv supports int64 on the CPU only."""
    return torch.mv(rows, columns) if rows.device.type == "cpu" else (rows * columns).sum(dim=1)


def sum_elements(grid: IndexedBlock) -> torch.Tensor:
    """Sums elements with any indices. Returns both lanes.

    grid: a block whose tensor is 1-D and int8, int16 or int32.
    """
    elements = grid.tensor
    total = torch.zeros(2, dtype=torch.int64, device=elements.device)
    per_word = 4 // elements.element_size()
    for begin in range(0, elements.numel(), _MOST_ELEMENTS):
        part = elements[begin : begin + _MOST_ELEMENTS].to(torch.int64) & ((1 << (32 // per_word)) - 1)
        rest = torch.arange(begin, begin + part.numel(), device=elements.device)
        index = torch.full_like(rest, grid.base)
        for size, stride in zip(reversed(grid.sizes), reversed(grid.strides), strict=True):
            index += rest % size * stride
            rest = rest // size
        word = index // per_word
        bits = part << (index % per_word * (32 // per_word))
        row, column = word // ROW_WORDS, word % ROW_WORDS
        lanes = []
        for of_row, of_column in zip(compute_row_keys(row), compute_column_keys(elements.device), strict=True):
            lanes.append((bits * of_column[column] * of_row).sum())
            # The words with their halves in the other order: int64 of which 32 bits are used.
            bits = (bits >> 16) | ((bits & 0xFFFF) << 16)
        total += torch.stack(lanes)
    return total
