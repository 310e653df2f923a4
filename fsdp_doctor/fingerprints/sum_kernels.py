"""The sum as two Triton kernels, each one launch for any number of blocks.

Consecutive words are read once, at the speed of memory: a program has some rows of 4096 words, multiplies each row by
its key, adds the rows, and only then multiplies by the keys of the columns. So a word costs two products, and the keys
of the columns are made once a program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from fsdp_doctor.fingerprints.keyed_sum import ROW_WORDS, IndexedBlock, WordRun

_ROWS_A_PROGRAM = 64
_ELEMENTS_A_PROGRAM = 1 << 14
_TILE = 1024
_MOST_DIMS = 3


class SumTable:
    """The arguments of every program on the device: what it reads, and in which row it adds the sum.

    Made once for memory that stays where it is, it costs one launch for each sum.
    """

    def __init__(self, runs: Sequence[WordRun], grids: Sequence[IndexedBlock], device: torch.device) -> None:
        # Through pageable memory, so that the host's tables need not outlive the call.
        by_alignment = {aligned: [run for run in runs if _is_aligned(run) == aligned] for aligned in (True, False)}
        self._words = {
            aligned: _word_programs(chosen).to(device, non_blocking=True)
            for aligned, chosen in by_alignment.items()
            if chosen
        }
        by_size = {size: [grid for grid in grids if grid.tensor.element_size() == size] for size in (1, 2, 4)}
        self._elements = {
            size: torch.cat([_list_element_programs(part) for grid in chosen for part in _reduce_dims(grid)]).to(
                device, non_blocking=True
            )
            for size, chosen in by_size.items()
            if chosen
        }

    def add(self, into: torch.Tensor) -> None:
        """into: (tensors, 2), int64, on the table's device."""
        for aligned, table in self._words.items():
            _sum_words[(len(table),)](
                table,
                into,
                into.stride(0),
                ROW=ROW_WORDS,
                NUM_ROWS=_ROWS_A_PROGRAM,
                ALIGNED=aligned,
                num_warps=16,
            )
        for itemsize, table in self._elements.items():
            _sum_elements[(len(table),)](
                table,
                into,
                into.stride(0),
                ITEM_BITS=8 * itemsize,
                ROW=ROW_WORDS,
                LENGTH=_ELEMENTS_A_PROGRAM,
                TILE=_TILE,
                num_warps=4,
            )


def _word_programs(runs: Sequence[WordRun]) -> torch.Tensor:
    """A row of arguments for each program, on the host; as one expression, for there are thousands."""
    fields = [
        (run.words.data_ptr() - 4 * run.first, run.first, run.first + run.words.numel(), run.number) for run in runs
    ]
    origin, first, last, number = torch.tensor(fields, dtype=torch.int64, device="cpu").unbind(1)
    words = ROW_WORDS * _ROWS_A_PROGRAM
    counts = (last + words - 1) // words - first // words
    of_run = torch.repeat_interleave(torch.arange(len(runs), device="cpu"), counts)
    program = torch.arange(len(of_run), device="cpu") - (counts.cumsum(0) - counts)[of_run] + (first // words)[of_run]
    return torch.stack([origin[of_run], first[of_run], last[of_run], program * _ROWS_A_PROGRAM, number[of_run]], 1)


def _is_aligned(run: WordRun) -> bool:
    """Whether four words can be read at once from any multiple of four on."""
    return (run.words.data_ptr() - 4 * run.first) % 16 == 0


def _reduce_dims(grid: IndexedBlock) -> list[IndexedBlock]:
    """Divides the grid along its first dims until it has no more than the kernel handles."""
    if len(grid.sizes) <= _MOST_DIMS:
        return [grid]
    parts = grid.tensor.view(grid.sizes[0], -1)
    return [
        few
        for index, elements in enumerate(parts)
        for few in _reduce_dims(
            IndexedBlock(grid.number, elements, grid.base + index * grid.strides[0], grid.sizes[1:], grid.strides[1:])
        )
    ]


def _list_element_programs(grid: IndexedBlock) -> torch.Tensor:
    """A row of arguments for each program, on the host."""
    missing = _MOST_DIMS - len(grid.sizes)
    sizes, strides = (1,) * missing + grid.sizes, (0,) * missing + grid.strides
    place = (grid.base, *strides, *sizes[1:], grid.number)
    begins = torch.arange(0, grid.tensor.numel(), _ELEMENTS_A_PROGRAM, device="cpu")
    first = torch.tensor([grid.tensor.data_ptr(), 0, grid.tensor.numel(), *place], device="cpu")
    programs = first.repeat(len(begins), 1)
    programs[:, 1] = begins
    return programs


# Triton reads annotations as code: only those that it knows are there.


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _compute_keys(counters, family: tl.constexpr):  # type: ignore[no-untyped-def]
    """splitmix64, as ``keyed_sum.keys``."""
    mixed = (counters.to(tl.uint64) * 4 + (family + 1)) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = mixed ^ (mixed >> 31)
    return (mixed | 1).to(tl.int64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum_words(  # type: ignore[no-untyped-def]
    table,
    into,
    stride,
    ROW: tl.constexpr,  # noqa: N803
    NUM_ROWS: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
):
    entry = table + tl.program_id(0).to(tl.int64) * 5
    # Where word 0 of the tensor would lie: of the words, [first, last) are there.
    origin = tl.load(entry)
    first, last = tl.load(entry + 1), tl.load(entry + 2)
    row, number = tl.load(entry + 3), tl.load(entry + 4)
    memory = origin.to(tl.pointer_type(tl.int32))
    if ALIGNED:
        memory = tl.multiple_of(memory, 16)
    columns = tl.arange(0, ROW)
    one = tl.zeros((ROW,), dtype=tl.int64)
    two = tl.zeros((ROW,), dtype=tl.int64)
    num_rows = tl.minimum(NUM_ROWS, (last + ROW - 1) // ROW - row)
    # Two rows at once: the second is on its way while the first is multiplied.
    for step in range(0, num_rows, 2):
        index = row + step
        start = tl.multiple_of(index * ROW, ROW)
        place = start + columns
        if (start >= first) & (start + 2 * ROW <= last):
            upper = tl.load(memory + place)
            lower = tl.load(memory + place + ROW)
        else:
            upper = tl.load(memory + place, mask=(place >= first) & (place < last), other=0)
            lower = tl.load(memory + place + ROW, mask=(place + ROW >= first) & (place + ROW < last), other=0)
        upper = upper.to(tl.uint32, bitcast=True)
        lower = lower.to(tl.uint32, bitcast=True)
        one += upper.to(tl.int64) * _compute_keys(index, 2) + lower.to(tl.int64) * _compute_keys(index + 1, 2)
        upper = (upper >> 16) | (upper << 16)
        lower = (lower >> 16) | (lower << 16)
        two += upper.to(tl.int64) * _compute_keys(index, 3) + lower.to(tl.int64) * _compute_keys(index + 1, 3)
    tl.atomic_add(into + number * stride, tl.sum(one * _compute_keys(columns, 0), axis=0), sem="relaxed")
    tl.atomic_add(into + number * stride + 1, tl.sum(two * _compute_keys(columns, 1), axis=0), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum_elements(  # type: ignore[no-untyped-def]
    table,
    into,
    stride,
    ITEM_BITS: tl.constexpr,  # noqa: N803
    ROW: tl.constexpr,  # noqa: N803
    LENGTH: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    entry = table + tl.program_id(0).to(tl.int64) * 10
    begin, numel, base = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    outer, middle, inner = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    middles, inners, number = tl.load(entry + 7), tl.load(entry + 8), tl.load(entry + 9)
    if ITEM_BITS == 8:
        memory = tl.load(entry).to(tl.pointer_type(tl.int8))
    elif ITEM_BITS == 16:
        memory = tl.load(entry).to(tl.pointer_type(tl.int16))
    else:
        memory = tl.load(entry).to(tl.pointer_type(tl.int32))
    one = tl.zeros((TILE,), dtype=tl.int64)
    two = tl.zeros((TILE,), dtype=tl.int64)
    for offset in range(0, LENGTH, TILE):
        place = begin + offset + tl.arange(0, TILE)
        bits = tl.load(memory + place, mask=place < numel, other=0).to(tl.int64) & ((1 << ITEM_BITS) - 1)
        index = base + place // (middles * inners) * outer + place // inners % middles * middle + place % inners * inner
        word = index // (32 // ITEM_BITS)
        bits = bits << (index % (32 // ITEM_BITS) * ITEM_BITS)
        row, column = word // ROW, word % ROW
        one += bits * _compute_keys(row, 2) * _compute_keys(column, 0)
        bits = (bits >> 16) | ((bits & 0xFFFF) << 16)
        two += bits * _compute_keys(row, 3) * _compute_keys(column, 1)
    tl.atomic_add(into + number * stride, tl.sum(one, axis=0), sem="relaxed")
    tl.atomic_add(into + number * stride + 1, tl.sum(two, axis=0), sem="relaxed")
