"""Triton kernel that computes the sum: one launch for any number of blocks of memory.

Each program reads its arguments from one row of a table. A program for consecutive words sums some columns of some rows
of 4096 words: it multiplies each row by its key, adds the rows, and multiplies by the columns' keys only at the end, so
each word costs two products. A program for elements with other indices sums a tile: neighbours in memory are read
together, and each element has its own row key and column key. All keys are read from memory, since computing a key
costs as much as summing some words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from fsdp_doctor.weights.fingerprints.keyed_sum import (
    ROW_WORDS,
    IndexedBlock,
    WordRun,
    compute_column_keys,
    compute_row_keys,
)


@dataclass(frozen=True, kw_only=True)
class ProgramShape:
    """Size of the work of one program.

    A program sums a block of ``rows`` rows and ``columns`` columns of a run of words, or several tiles that have at
    most ``rows`` rows in total. The sizes are small so that many programs fit on a multiprocessor: while one program
    multiplies, others read.
    """

    columns: int = 512
    rows: int = 64
    tile_rows: int = 2
    tile_columns: int = 128
    num_warps: int = 4


SHAPE = ProgramShape()
# The last is the address of the storage, which the kernel does not read.
_FIELDS = 10
# Values of the first field: for a run of words, whether four words can be read at once from any multiple of four on;
# for a tile, the bits of an element.
_UNALIGNED, _ALIGNED = 0, 1


class SumTable:
    """Table on the device with the arguments of every program: the memory that it reads, and the row to which it adds.

    For memory that stays at its address, the table is made once, and each sum costs one launch. The table keeps none of
    the summed tensors alive.
    """

    def __init__(self, runs: Sequence[WordRun], grids: Sequence[IndexedBlock], device: torch.device) -> None:
        self._shape = SHAPE
        programs = [_list_run_programs(runs, SHAPE)] if runs else []
        programs += [_list_tile_programs(grid, SHAPE) for grid in grids]
        empty = torch.empty(0, _FIELDS, dtype=torch.int64, device="cpu")
        # Through pageable memory, so that the host's table need not outlive the call.
        self._on_host = torch.cat([empty, *programs])
        self._programs = self._on_host.to(device, non_blocking=True)
        # A program reads two rows at once, of which the second may be no row of the tensor.
        last_words = [(run.first + run.words.numel()) for run in runs] + [_find_last_word(grid) for grid in grids]
        num_rows = max(last_words, default=0) // ROW_WORDS + 2
        self._row_keys = torch.stack(compute_row_keys(torch.arange(num_rows, device=device)))
        self._column_keys = torch.stack(compute_column_keys(device))

    def move(self, moved: Mapping[int, int]) -> None:
        """Updates the addresses of storages that were reallocated.

        moved: the new address of each storage, by its old address.
        """
        storages = self._on_host[:, -1].contiguous()
        before, now = torch.tensor(sorted(moved.items()), dtype=torch.int64, device="cpu").unbind(1)
        new = now[torch.searchsorted(before.contiguous(), storages)]
        self._on_host[:, 2] += new - storages
        self._on_host[:, -1] = new
        self._programs = self._on_host.to(self._programs.device, non_blocking=True)

    def add(self, into: torch.Tensor) -> None:
        """Adds the sums to ``into``, a tensor of shape (tensors, 2) and dtype int64 on the table's device."""
        if not len(self._programs):
            return
        _sum_programs[(len(self._programs),)](
            self._programs,
            self._row_keys,
            self._row_keys.shape[1],
            self._column_keys,
            into,
            into.stride(0),
            FIELDS=_FIELDS,
            ROW=ROW_WORDS,
            COLUMNS=self._shape.columns,
            NUM_ROWS=self._shape.rows,
            TILE_ROWS=self._shape.tile_rows,
            TILE_COLUMNS=self._shape.tile_columns,
            num_warps=self._shape.num_warps,
        )


def _list_run_programs(runs: Sequence[WordRun], shape: ProgramShape) -> torch.Tensor:
    """Returns one row of arguments for each program, on the host.

    All rows are computed by tensor operations, since there are thousands of them.
    """
    fields = [
        (
            run.words.data_ptr() - 4 * run.first,
            run.first,
            run.first + run.words.numel(),
            run.number,
            run.words.untyped_storage().data_ptr(),
        )
        for run in runs
    ]
    origin, first, last, number, storage = torch.tensor(fields, dtype=torch.int64, device="cpu").unbind(1)
    words = ROW_WORDS * shape.rows
    counts = (last + words - 1) // words - first // words
    of_run = torch.repeat_interleave(torch.arange(len(runs), device="cpu"), counts)
    program = torch.arange(len(of_run), device="cpu") - (counts.cumsum(0) - counts)[of_run] + (first // words)[of_run]
    kind = torch.where(origin % 16 == 0, _ALIGNED, _UNALIGNED)
    whole = torch.stack(
        [kind[of_run], number[of_run], origin[of_run], first[of_run], last[of_run], program * shape.rows], 1
    )
    columns = torch.arange(0, ROW_WORDS, shape.columns, device="cpu")
    programs = torch.cat([whole.repeat_interleave(len(columns), 0), columns.repeat(len(whole))[:, None]], 1)
    programs = torch.nn.functional.pad(programs, (0, _FIELDS - programs.shape[1]))
    programs[:, -1] = storage[of_run].repeat_interleave(len(columns))
    return programs


def _list_tile_programs(grid: IndexedBlock, shape: ProgramShape) -> torch.Tensor:
    """Returns one row of arguments for each program, on the host. Each index of the outer dims has separate tiles."""
    *outer, num_rows, num_columns = (1, 1, *grid.sizes)
    *outer_strides, row_stride, column_stride = (0, 0, *grid.strides)
    itemsize = grid.tensor.element_size()
    base = torch.tensor([grid.base], dtype=torch.int64, device="cpu")
    for size, stride in zip(outer, outer_strides, strict=True):
        base = (base[:, None] + stride * torch.arange(size, device="cpu")).view(-1)
    block = torch.arange(len(base), device="cpu")
    row = torch.arange(0, num_rows, shape.rows, device="cpu")
    column = torch.arange(0, num_columns, shape.tile_columns, device="cpu")
    block, row, column = (each.reshape(-1) for each in torch.meshgrid(block, row, column, indexing="ij"))
    same = torch.ones_like(row)
    return torch.stack(
        [
            8 * itemsize * same,
            grid.number * same,
            grid.tensor.data_ptr() + itemsize * ((block * num_rows + row) * num_columns + column),
            base[block] + row * row_stride + column * column_stride,
            (num_rows - row).clamp(max=shape.rows),
            (num_columns - column).clamp(max=shape.tile_columns),
            num_columns * same,
            row_stride * same,
            column_stride * same,
            grid.tensor.untyped_storage().data_ptr() * same,
        ],
        1,
    )


def _find_last_word(grid: IndexedBlock) -> int:
    last = grid.base + sum((size - 1) * stride for size, stride in zip(grid.sizes, grid.strides, strict=True))
    return math.ceil((last + 1) * grid.tensor.element_size() / 4)


# Triton reads annotations as code: only those that it knows are there.


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum_programs(  # type: ignore[no-untyped-def]
    table,
    row_keys,
    num_keys,
    column_keys,
    into,
    stride,
    FIELDS: tl.constexpr,  # noqa: N803
    ROW: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    NUM_ROWS: tl.constexpr,  # noqa: N803
    TILE_ROWS: tl.constexpr,  # noqa: N803
    TILE_COLUMNS: tl.constexpr,  # noqa: N803
):
    """Computes the sums that one row of the table describes, and adds them to ``into``.

    row_keys, column_keys: the keys of the first lane, followed by the keys of the second lane.
    """
    entry = table + tl.program_id(0).to(tl.int64) * FIELDS
    kind = tl.load(entry)
    target = into + tl.load(entry + 1) * stride
    if kind == 1:
        one, two = _sum_run(entry, row_keys, num_keys, column_keys, ROW, COLUMNS, NUM_ROWS, True)
    elif kind == 0:
        one, two = _sum_run(entry, row_keys, num_keys, column_keys, ROW, COLUMNS, NUM_ROWS, False)
    elif kind == 32:
        one, two = _sum_tile(entry, row_keys, num_keys, column_keys, 32, ROW, TILE_ROWS, TILE_COLUMNS)
    elif kind == 16:
        one, two = _sum_tile(entry, row_keys, num_keys, column_keys, 16, ROW, TILE_ROWS, TILE_COLUMNS)
    else:
        one, two = _sum_tile(entry, row_keys, num_keys, column_keys, 8, ROW, TILE_ROWS, TILE_COLUMNS)
    tl.atomic_add(target, one, sem="relaxed")
    tl.atomic_add(target + 1, two, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum_run(  # type: ignore[no-untyped-def]
    entry,
    row_keys,
    num_keys,
    column_keys,
    ROW: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    NUM_ROWS: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
):
    # Where word 0 of the tensor would lie: of the words, [first, last) are there.
    memory = tl.load(entry + 2).to(tl.pointer_type(tl.int32))
    if ALIGNED:
        memory = tl.multiple_of(memory, 16)
    first, last, row = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    columns = tl.multiple_of(tl.load(entry + 6), COLUMNS) + tl.arange(0, COLUMNS)
    one = tl.zeros((COLUMNS,), dtype=tl.int64)
    two = tl.zeros((COLUMNS,), dtype=tl.int64)
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
        one += upper.to(tl.int64) * tl.load(row_keys + index) + lower.to(tl.int64) * tl.load(row_keys + index + 1)
        upper = (upper >> 16) | (upper << 16)
        lower = (lower >> 16) | (lower << 16)
        keys = row_keys + num_keys + index
        two += upper.to(tl.int64) * tl.load(keys) + lower.to(tl.int64) * tl.load(keys + 1)
    one *= tl.load(column_keys + columns)
    two *= tl.load(column_keys + ROW + columns)
    return tl.sum(one, axis=0), tl.sum(two, axis=0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum_tile(  # type: ignore[no-untyped-def]
    entry,
    row_keys,
    num_keys,
    column_keys,
    BITS: tl.constexpr,  # noqa: N803
    ROW: tl.constexpr,  # noqa: N803
    TILE_ROWS: tl.constexpr,  # noqa: N803
    TILE_COLUMNS: tl.constexpr,  # noqa: N803
):
    if BITS == 8:
        memory = tl.load(entry + 2).to(tl.pointer_type(tl.int8))
    elif BITS == 16:
        memory = tl.load(entry + 2).to(tl.pointer_type(tl.int16))
    else:
        memory = tl.load(entry + 2).to(tl.pointer_type(tl.int32))
    first, num_rows, num_columns = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    pitch, row_stride, column_stride = tl.load(entry + 6), tl.load(entry + 7), tl.load(entry + 8)
    columns = tl.arange(0, TILE_COLUMNS)[None, :].to(tl.int64)
    one = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.int64)
    two = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.int64)
    for step in range(0, num_rows, TILE_ROWS):
        rows = step + tl.arange(0, TILE_ROWS)[:, None].to(tl.int64)
        is_there = (rows < num_rows) & (columns < num_columns)
        bits = tl.load(memory + rows * pitch + columns, mask=is_there, other=0).to(tl.int64) & ((1 << BITS) - 1)
        index = first + rows * row_stride + columns * column_stride
        word = index // (32 // BITS)
        bits = bits << (index % (32 // BITS) * BITS)
        row, column = row_keys + word // ROW, column_keys + word % ROW
        one += bits * tl.load(row, mask=is_there, other=0) * tl.load(column, mask=is_there, other=0)
        bits = (bits >> 16) | ((bits & 0xFFFF) << 16)
        row_key = tl.load(row + num_keys, mask=is_there, other=0)
        two += bits * row_key * tl.load(column + ROW, mask=is_there, other=0)
    return tl.sum(tl.sum(one, axis=1), axis=0), tl.sum(tl.sum(two, axis=1), axis=0)
