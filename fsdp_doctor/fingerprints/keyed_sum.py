"""The sum, and what it detects.

A tensor's bytes, in row-major order, little-endian, are words of 32 bits; the last one is filled up with zeros. The
words stand in rows of 4096. With a key of 64 bits for each row and for each column, a lane of the sum is

    sum over all words of  row_key(word // 4096) * column_key(word % 4096) * word   modulo 2**64

and there are two lanes, with other keys; in the second one the halves of each word change places first. The keys
are odd numbers out of splitmix64. So:

- a word that is held in parts (two bfloat16 on two ranks) is the sum of its parts, and every rank may sum what it
  holds, in any order: the sums of all ranks add up to that of the whole tensor, however it is divided;
- one changed word, or any change within one, is always seen, since odd keys have inverses;
- any other change (a swap, a permutation, a transposition, values of another step) is missed with a probability
  of less than 2**-66 if the keys are taken for random numbers, and typically 2**-110. The weakest case is one in which
  all differing bits are the highest of their words: what has 33 bits left in one lane has 49 in the other;
- zeros add nothing. So a fingerprint also has the dtype, the shape, and how many elements were summed.

It is no cryptographic hash: the sum is linear and the keys are known, so whoever wants two tensors with the same
fingerprint can make them. A tensor and itself in another dtype have nothing in common.
"""

from __future__ import annotations

import functools

import torch

VERSION = 1
"""Of the sum: fingerprints of two versions cannot be compared."""
ROW_WORDS = 4096

_GAMMA = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number, as are the next two
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_SHIFTS = (30, 27, 31)
# Of the words that are worked on at once: on the CPU what its caches hold.
_MOST_ROWS = {"cpu": 64}
_MOST_ROWS_ELSEWHERE = 1024
_MOST_ELEMENTS = 1 << 19


def keys(counters: torch.Tensor, family: int) -> torch.Tensor:
    """splitmix64 of ``4 * counters + family``, made odd. int64, in and out, on any device."""
    mixed = (4 * counters + family + 1) * _GAMMA
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        mixed = mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))
        if factor is not None:
            mixed = mixed * factor
    return mixed | 1


@functools.lru_cache(maxsize=16)
def column_keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each lane, int64."""
    columns = torch.arange(ROW_WORDS, device=device)
    return keys(columns, 0), keys(columns, 1)


def row_keys(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return keys(rows, 2), keys(rows, 3)


def sum_of_words(words: torch.Tensor, first: int) -> torch.Tensor:
    """Of words that follow one another, int32, 1-D: both lanes, int64. first: the index of the first one."""
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    column = first % ROW_WORDS
    most_rows = _MOST_ROWS.get(words.device.type, _MOST_ROWS_ELSEWHERE)
    most_rows = min(most_rows, -(-(column + words.numel()) // ROW_WORDS))
    rows = torch.empty(most_rows, ROW_WORDS, dtype=torch.int64, device=words.device)
    swapped = torch.empty_like(rows)
    while words.numel():
        part = words[: rows.numel() - column]
        num_rows = -(-(column + part.numel()) // ROW_WORDS)
        total += _sum_of_rows(part, first // ROW_WORDS, column, rows[:num_rows], swapped[:num_rows])
        words, first, column = words[part.numel() :], first + part.numel(), 0
    return total


def _sum_of_rows(words: torch.Tensor, row: int, column: int, rows: torch.Tensor, swapped: torch.Tensor) -> torch.Tensor:
    """rows, swapped: memory to use, which spares the CPU new pages at each step."""
    flat = rows.view(-1)
    flat[:column], flat[column + words.numel() :] = 0, 0
    flat[column : column + words.numel()] = words
    rows &= 0xFFFFFFFF
    torch.bitwise_right_shift(rows, 16, out=swapped)
    one, two = row_keys(torch.arange(row, row + len(rows), device=words.device))
    of_column_one, of_column_two = column_keys(words.device)
    first_lane = _times(rows, of_column_one).mul_(one).sum()
    swapped |= rows.bitwise_and_(0xFFFF).mul_(1 << 16)
    return torch.stack([first_lane, _times(swapped, of_column_two).mul_(two).sum()])


def _times(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The product of a matrix and a vector, which torch has for int64 on the CPU alone."""
    return torch.mv(rows, columns) if rows.device.type == "cpu" else (rows * columns).sum(dim=1)


def sum_of_elements(
    elements: torch.Tensor, base: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """Of elements wherever they belong: both lanes.

    elements: int8, int16 or int32, 1-D. An element with the coordinates ``c`` among ``sizes`` is number
    ``base + sum(c * stride)`` of the tensor.
    """
    total = torch.zeros(2, dtype=torch.int64, device=elements.device)
    per_word = 4 // elements.element_size()
    for begin in range(0, elements.numel(), _MOST_ELEMENTS):
        part = elements[begin : begin + _MOST_ELEMENTS].to(torch.int64) & ((1 << (32 // per_word)) - 1)
        rest = torch.arange(begin, begin + part.numel(), device=elements.device)
        index = torch.full_like(rest, base)
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            index += rest % size * stride
            rest = rest // size
        word = index // per_word
        bits = part << (index % per_word * (32 // per_word))
        row, column = word // ROW_WORDS, word % ROW_WORDS
        lanes = []
        for of_row, of_column in zip(row_keys(row), column_keys(elements.device), strict=True):
            lanes.append((bits * of_column[column] * of_row).sum())
            bits = _halves_swapped(bits)
        total += torch.stack(lanes)
    return total


def _halves_swapped(words: torch.Tensor) -> torch.Tensor:
    """int64 with 32 bits in use, in and out."""
    return (words >> 16) | ((words & 0xFFFF) << 16)
