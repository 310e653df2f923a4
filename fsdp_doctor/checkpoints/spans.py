"""Collects facts about the bytes of one piece of a tensor while its file is read in order, chunk by chunk."""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy

from fsdp_doctor.checkpoints.dtypes import DTYPES
from fsdp_doctor.checkpoints.record import SavedPiece, SavedTensor
from fsdp_doctor.checkpoints.sums import crc32

_Array: TypeAlias = "numpy.ndarray[Any, Any]"

PAGE_BYTES = 4096
_ZERO_PAGE = bytes(PAGE_BYTES)
# Quick test for zero pages: every 512th byte of a chunk must contain eight zeros in a row. Most chunks do not.
_ZERO_SAMPLE, _SAMPLE_STEP = bytes(8), PAGE_BYTES // 8
_MOST_CANDIDATES = 1000
_MOST_RUNS = 1000
_HEAD_BYTES = 8
# _SAMPLE: the number of evenly spaced elements whose magnitude is sampled. _FEWEST_FOR_SIZE: the number of elements
# below which a piece is too small to compare.
_SAMPLE, _FEWEST_FOR_SIZE = 64, 256
# Codes of 8 bits: the least mean and number of different magnitudes in a sample, and the largest magnitudes.
_LEAST_CODE, _FEWEST_CODES, _LARGEST_INT8, _LARGEST_E4M3 = 16.0, 12, 128.0, 448.0
# If float32 elements are really pairs of bfloat16 values, few different bytes occur where the exponent of the lower
# value lies. In real float32 values these bytes are random.
_FEW_EXPONENTS, _LOOKED_AT = 12, 1024
# Rows of each chunk that are checked for zero columns, and the fewest rows from which zero columns are reported.
_ROWS_FOR_COLUMNS, _FEWEST_ROWS = 32, 8
# Numbers of parts of the columns that are compared with each other.
_PARTS_OF_COLUMNS = (2, 4, 8)
# Shorter rows may be equal by chance.
_SHORTEST_ROW_BYTES = 32
# Names of fused matrices, and how many distances between equal rows are kept for each: the most frequent ones.
_FUSED = re.compile(
    r"(?:^|[._])(?:w?qkv|qkv_proj|query_key_value|in_proj|kv|kv_proj|gate_up|gate_up_proj|w13)(?:[._]weight)?$"
)
_MOST_DISTANCES = 3
_ODD = 0x9E3779B97F4A7C15
# For each eighth of the rows, this many rows are compared.
_BLOCKS, _ROWS_OF_BLOCK = 8, 8


class _FloatFormat(NamedTuple):
    """Layout of a floating-point dtype.

    ``huge`` is the bit pattern of 1e30, or of infinity if the dtype cannot hold 1e30. ``dtype`` is the NumPy dtype to
    which the bits belong after they are shifted left by ``shift``.
    """

    huge: int
    dtype: str
    shift: int = 0


_FLOATS = {
    "float64": _FloatFormat(0x46293E5939A08CEA, "<f8"),
    "float32": _FloatFormat(0x7149F2CA, "<f4"),
    "bfloat16": _FloatFormat(0x714A, "<f4", 16),
    "float16": _FloatFormat(0x7C00, "<f2"),
    "float8_e5m2": _FloatFormat(0x7C, "<f2", 8),
}
# Tensors whose elements are never negative.
_FACTORS = frozenset({"exp_avg_sq_row", "exp_avg_sq_col", "row_var", "col_var"})
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "running_var"}) | _FACTORS
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})


@dataclass(slots=True)
class SpanScan:
    """Facts about the bytes of a tensor's piece.

    ``crc`` is None if a hole was skipped. ``is_zero`` accepts zeros of either sign. ``num_huge`` counts finite elements
    beyond 1e30, and ``largest`` is the largest of these magnitudes. ``first_bad`` is the index of the first element
    that is huge, NaN or infinite. ``num_negative`` is counted only for mean squares and variances.

    ``total`` is the sum of all elements, for the row and column factors of a mean of squares.

    ``size`` is the mean magnitude of a sample of elements, and ``spread`` is the standard deviation of the magnitudes
    divided by that mean. ``sample`` holds these elements for Adam's moments and where samples were requested; pieces of
    the same shape are sampled at equal indices. ``looks_split`` is true if the first float32 elements look like pairs
    of bfloat16 values. ``looks_coded`` is the 8-bit dtype whose codes the sampled elements have as their values, or
    empty. ``zero_runs`` are at most 1000 ranges of zero bytes that contain a whole page of the file.

    The other facts exist for contiguous pieces with two or more dims, in which a row runs along the last dim.
    ``zero_columns`` (first, after the last) are zero in all rows that were checked. ``equal_columns`` are two halves,
    quarters or eighths of the columns that are equal in all rows that were checked, as (number of such parts, one part,
    equal part). ``equal_rows`` is the longest run of equal rows that are not zero. ``row_sums`` are the CRC-32s of
    eight rows from each eighth of the piece, None for a row that spans two chunks, and empty if the number of rows is
    not divisible by 64. ``repeats``, for fused matrices, are the commonest distances between rows with equal first and
    last bytes, and how many rows repeat at each distance.
    """

    nbytes: int
    crc: int | None = 0
    is_zero: bool = True
    is_constant: bool = True
    num_nan: int = 0
    num_inf: int = 0
    num_minus_inf: int = 0
    num_huge: int = 0
    largest: float = 0.0
    num_negative: int = 0
    total: float = 0.0
    size: float | None = None
    spread: float | None = None
    sample: _Array | None = None
    looks_split: bool = False
    looks_coded: str = ""
    first_bad: int | None = None
    zero_runs: list[tuple[int, int]] = field(default_factory=list)
    zero_columns: tuple[int, int] | None = None
    equal_rows: tuple[int, int] | None = None
    equal_columns: tuple[int, int, int] | None = None
    row_sums: tuple[int | None, ...] = ()
    repeats: tuple[tuple[int, int], ...] = ()
    head: bytes = b""


class SpanScanner:
    """Reads the bytes of a file in order and collects facts about one piece."""

    def __init__(
        self, begin: int, nbytes: int, tensor: SavedTensor, piece: SavedPiece, *, keeps_sample: bool = False
    ) -> None:
        self.begin, self.end = begin, begin + nbytes
        self.scan = SpanScan(nbytes)
        self._dtype, self._itemsize = tensor.dtype, DTYPES[tensor.dtype].itemsize
        self._float = _FLOATS.get(tensor.dtype)
        self._is_square = self._float is not None and tensor.last_name in _SQUARES
        self._is_factor = self._float is not None and tensor.last_name in _FACTORS
        self._keeps_sample = keeps_sample or tensor.last_name in _MOMENTS
        self._tail = b""
        self._num_candidates = 0
        self._zeros_before = 0
        count = nbytes // self._itemsize
        every = numpy.arange(min(count, _SAMPLE))
        self._places = every if count <= _SAMPLE else (every * 2 + 1) * count // (2 * _SAMPLE)
        self._sample = numpy.full(len(self._places), math.nan)
        is_matrix = self._float is not None and len(piece.shape) > 1 and piece.is_contiguous
        self._rows = _RowScanner(tensor, piece, nbytes) if is_matrix else None

    def skip(self, begin: int, end: int) -> None:
        if max(begin, self.begin) < min(end, self.end):
            self.scan.crc = None
            self._add_run(max(begin, self.begin) - self.begin, min(end, self.end) - self.begin)

    def feed(self, offset: int, chunk: bytes, *, sums: bool) -> None:
        if offset >= self.end or offset + len(chunk) <= self.begin:
            return
        first = max(self.begin - offset, 0)
        if first or self.end < offset + len(chunk):
            chunk = chunk[first : self.end - offset]
            offset += first
        place, scan = offset - self.begin, self.scan
        scan.crc = crc32(chunk, scan.crc) if sums and scan.crc is not None else scan.crc
        scan.head += chunk[: max(_HEAD_BYTES - len(scan.head), 0)]
        if scan.is_zero and self._float is None:
            scan.is_zero = not chunk.strip(b"\0")
        self._find_zeros(place, chunk)
        if self._float is not None:
            self._look_at_elements(self._float, place, chunk)
        if self._rows is not None:
            self._rows.feed(place, chunk)

    def finish(self) -> SpanScan:
        """Returns the facts after all bytes were fed."""
        scan = self.scan
        if self._float is None:
            return scan
        if self._rows is not None:
            self._rows.finish(scan)
        sizes = numpy.abs(self._sample[numpy.isfinite(self._sample)])
        if len(sizes) and scan.nbytes >= _FEWEST_FOR_SIZE * self._itemsize:
            scan.size = float(sizes.mean())
            scan.spread = float(sizes.std() / scan.size) if scan.size else None
            scan.looks_coded = _find_codes(sizes) if self._itemsize > 1 and len(sizes) == _SAMPLE else ""
        if self._keeps_sample:
            scan.sample = self._sample
        return scan

    def _look_at_elements(self, form: _FloatFormat, place: int, chunk: bytes) -> None:
        size = self._itemsize
        head = min(-place % size, len(chunk))
        self._tail += chunk[:head]
        if len(self._tail) == size:
            self._look_at_bits(form, numpy.frombuffer(self._tail, f"<u{size}"), place // size)
            self._tail = b""
        first, count = (place + head) // size, (len(chunk) - head) // size
        if count:
            self._look_at_bits(form, numpy.frombuffer(chunk, f"<u{size}", count, head), first)
            if not first and self._dtype == "float32":
                self._look_for_bfloat16(chunk)
        self._tail += chunk[head + count * size :]

    def _look_at_bits(self, form: _FloatFormat, bits: _Array, first: int) -> None:
        """Collects facts about complete elements. ``first`` is the index of the first element in the piece."""
        size, scan = self._itemsize, self.scan
        signed, sign = bits.view(f"<i{size}"), 0x80 << 8 * (size - 1)
        if self._is_square:
            scan.num_negative += int(numpy.count_nonzero(bits > sign))
        if self._is_factor:
            scan.total += float(_read_floats(form, bits).sum())
        if scan.is_constant:
            is_as_first = scan.head[:size] == bits[:1].tobytes() and bits[0] == bits[-1]
            scan.is_constant = bool(is_as_first and (bits == bits[0]).all())
        low, high = numpy.searchsorted(self._places, (first, first + len(bits)))
        if low < high:
            self._sample[low:high] = _read_floats(form, bits[self._places[low:high] - first])
        if scan.is_zero:
            scan.is_zero = not (bits & (sign - 1)).any()
        if int(signed.max()) < form.huge and int(bits.max()) < sign | form.huge:
            return  # true of nearly all chunks, and cheaper than the search below
        candidates = numpy.flatnonzero(bits & (sign - 1) >= form.huge)[: _MOST_CANDIDATES - self._num_candidates]
        self._num_candidates += len(candidates)
        for at, value in zip(candidates.tolist(), _read_floats(form, bits[candidates]).tolist(), strict=True):
            if math.isfinite(value):
                scan.num_huge += 1
                scan.largest = max(scan.largest, abs(value))
            scan.num_nan += math.isnan(value)
            scan.num_inf += value == math.inf
            scan.num_minus_inf += value == -math.inf
            scan.first_bad = first + at if scan.first_bad is None else scan.first_bad

    def _look_for_bfloat16(self, chunk: bytes) -> None:
        middle = Counter(byte & 0x7F for byte in chunk[1 : 4 * _LOOKED_AT : 4])
        is_spread = len(set(chunk[0 : 4 * _LOOKED_AT : 4])) > 16
        few = sum(count for _, count in middle.most_common(_FEW_EXPONENTS))
        is_enough = self.scan.nbytes >= _LOOKED_AT
        self.scan.looks_split = is_enough and is_spread and few > 0.98 * middle.total()

    def _find_zeros(self, place: int, chunk: bytes) -> None:
        runs = self.scan.zero_runs
        if runs and runs[-1][1] == place:
            head = chunk[:PAGE_BYTES]
            self._add_run(place, place + len(head) - len(head.lstrip(b"\0")))
        at = chunk.find(_ZERO_PAGE) if _ZERO_SAMPLE in chunk[::_SAMPLE_STEP] else -1
        while at >= 0 and len(runs) < _MOST_RUNS:
            end = at + PAGE_BYTES
            while end < len(chunk) and chunk[end : end + PAGE_BYTES] == _ZERO_PAGE:
                end += PAGE_BYTES
            rest = chunk[end : end + PAGE_BYTES]
            end += len(rest) - len(rest.lstrip(b"\0"))
            self._add_run(place + at - (self._zeros_before if not at else 0), place + end)
            at = chunk.find(_ZERO_PAGE, end)
        rest = chunk[-PAGE_BYTES:]
        self._zeros_before = len(rest) - len(rest.rstrip(b"\0"))

    def _add_run(self, begin: int, end: int) -> None:
        runs = self.scan.zero_runs
        if runs and runs[-1][1] >= begin:
            runs[-1] = runs[-1][0], max(end, runs[-1][1])
        elif begin < end:
            runs.append((begin, end))


class _RowScanner:
    """Collects facts about the rows of a piece that lie completely within one chunk."""

    def __init__(self, tensor: SavedTensor, piece: SavedPiece, nbytes: int) -> None:
        self._bytes, self._itemsize = piece.shape[-1] * tensor.itemsize, tensor.itemsize
        self._count = nbytes // self._bytes
        self._is_filled = numpy.zeros(piece.shape[-1], bool)
        self._num_looked_at = self._num_compared = 0
        # Equal parts of the columns: (the number of parts, one part, an equal part). None before the first row.
        self._equal_columns: set[tuple[int, int, int]] | None = None
        self._longest = (0, 0)
        self._run = (0, 0)
        step = self._count // (_BLOCKS * _ROWS_OF_BLOCK)
        has_blocks = self._count % (_BLOCKS * _ROWS_OF_BLOCK) == 0 and self._bytes >= _SHORTEST_ROW_BYTES
        is_fused = self._bytes >= _SHORTEST_ROW_BYTES and _FUSED.search(tensor.name)
        self._ends = numpy.zeros(self._count if is_fused else 0, numpy.uint64)
        self._compared: dict[int, int | None] = dict.fromkeys(range(0, self._count, step)) if has_blocks else {}

    def feed(self, place: int, chunk: bytes) -> None:
        head = -place % self._bytes
        count = (len(chunk) - head) // self._bytes
        if count <= 0:
            return
        first = (place + head) // self._bytes
        rows = numpy.frombuffer(chunk, numpy.uint8, count * self._bytes, head).reshape(count, self._bytes)
        if not self._is_filled.all():
            looked_at = rows[:: -(-count // _ROWS_FOR_COLUMNS)].copy().view(f"<u{self._itemsize}")
            self._is_filled |= (looked_at << numpy.array(1, looked_at.dtype) != 0).any(0)  # ignores the sign
            self._num_looked_at += len(looked_at)
        if self._equal_columns is None or self._equal_columns:
            self._compare_columns(rows[:: -(-count // _ROWS_FOR_COLUMNS)])
        if self._bytes >= _SHORTEST_ROW_BYTES:
            self._find_equal(first, rows)
        if len(self._ends):
            begin, end = (rows[:, part].copy().view("<u8")[:, 0] for part in (slice(8), slice(-8, None)))
            self._ends[first : first + count] = begin ^ end * numpy.uint64(_ODD)
        if self._compared:
            step = self._count // len(self._compared)
            for row in range(-(-first // step) * step, first + count, step):
                self._compared[row] = zlib.crc32(rows[row - first].tobytes())

    def finish(self, scan: SpanScan) -> None:
        zero = numpy.flatnonzero(~self._is_filled) if self._num_looked_at >= _FEWEST_ROWS else numpy.arange(0)
        if len(zero) and not scan.is_zero:
            groups = numpy.split(zero, numpy.flatnonzero(numpy.diff(zero) != 1) + 1)
            longest = max(groups, key=len)
            scan.zero_columns = int(longest[0]), int(longest[-1]) + 1
        if self._equal_columns and self._num_compared >= _FEWEST_ROWS:
            scan.equal_columns = min(self._equal_columns)
        begin, end = self._longest
        scan.equal_rows = (begin, end) if end - begin > 1 else None
        scan.row_sums = tuple(self._compared.values())
        scan.repeats = self._count_repeats()

    def _count_repeats(self) -> tuple[tuple[int, int], ...]:
        order = numpy.argsort(self._ends, kind="stable")
        ordered = self._ends[order]
        is_repeated = (ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)
        counts = Counter(numpy.diff(order)[is_repeated].tolist())
        return tuple(counts.most_common(_MOST_DISTANCES))

    def _compare_columns(self, rows: _Array) -> None:
        """Keeps the pairs of equal halves, quarters and eighths of the columns that are equal in these rows, too.

        Rows in which all elements are equal show nothing.
        """
        elements = self._bytes // self._itemsize
        for each in rows:
            row = each.view(f"<u{self._itemsize}")
            if (row == row[0]).all():
                continue
            self._num_compared += 1
            if self._equal_columns is None:
                self._equal_columns = {
                    (count, one, other)
                    for count in _PARTS_OF_COLUMNS
                    if elements % count == 0 and self._bytes // count >= _SHORTEST_ROW_BYTES
                    for one, other in itertools.combinations(range(count), 2)
                }
            self._equal_columns = {
                (count, one, other)
                for count, one, other in self._equal_columns
                if _are_equal_parts(row.reshape(count, -1), one, other)
            }
            if not self._equal_columns:
                return

    def _find_equal(self, first: int, rows: _Array) -> None:
        """Finds rows that equal the previous row, by comparing first their first bytes and then all bytes."""
        heads = rows[:, :8].copy().view("<u8")[:, 0]
        candidates = numpy.flatnonzero((heads[1:] == heads[:-1]) & (heads[1:] != 0))
        for at in candidates.tolist():
            if bytes(rows[at]) == bytes(rows[at + 1]):
                begin = self._run[0] if self._run[1] == first + at + 1 else first + at
                self._run = begin, first + at + 2
                if self._run[1] - begin > self._longest[1] - self._longest[0]:
                    self._longest = self._run


def _are_equal_parts(parts: _Array, one: int, other: int) -> bool:
    """Returns whether two parts of a row are equal, but are not one element repeated."""
    return bool((parts[one] == parts[other]).all() and (parts[one] != parts[one][0]).any())


def _find_codes(sizes: _Array) -> str:
    """Returns the 8-bit dtype to whose codes the magnitudes belong; empty if the magnitudes are not codes.

    Codes have many different values, which lie on the dtype's grid and reach its largest value. Their mean is therefore
    far above that of weights.
    """
    if sizes.mean() <= _LEAST_CODE or len(numpy.unique(sizes)) < _FEWEST_CODES:
        return ""
    if sizes.max() <= _LARGEST_INT8 and (sizes == sizes.round()).all():
        return "int8"
    mantissas = numpy.frexp(sizes)[0] * 16  # 3 bits after the first one
    return "float8_e4m3" if sizes.max() <= _LARGEST_E4M3 and (mantissas == mantissas.round()).all() else ""


def _read_floats(form: _FloatFormat, bits: _Array) -> _Array:
    width = int(form.dtype[-1])
    wide = bits.astype(f"<u{width}") << numpy.array(form.shift, f"<u{width}") if form.shift else bits
    with numpy.errstate(invalid="ignore"):  # from signalling NaNs
        return wide.view(form.dtype).astype(numpy.float64)
