"""Reads the bytes of a checkpoint once, in order and in bounded memory: checksums, zeros, and what is not finite."""

from __future__ import annotations

import math
import pathlib
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy

from fsdp_doctor.checkpoints.dtypes import DTYPES
from fsdp_doctor.checkpoints.files import CHUNK_BYTES, BadFile, OpenFile
from fsdp_doctor.checkpoints.record import Member, SavedCheckpoint, SavedFile, SavedPiece, SavedTensor
from fsdp_doctor.checkpoints.sums import crc32
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble

SpanKey: TypeAlias = tuple[str, int, int]
# Is given the file, the offset in it, and the bytes; by any thread.
Sink: TypeAlias = Callable[[str, int, bytes], None]
PAGE_BYTES = 4096
_ZERO_PAGE = bytes(PAGE_BYTES)
# Of every 512th byte a page of zeros has eight that follow one another: most chunks have not, which is soon seen.
_ZERO_SAMPLE, _SAMPLE_STEP = bytes(8), PAGE_BYTES // 8
# A longer one is not read: its file would take hours, and holds nothing there.
_LONGEST_HOLE = 64 << 20
_MOST_CANDIDATES = 1000
_MOST_RUNS = 1000
_HEAD_BYTES = 8
_HUGE = 1e38
# Of the first chunks of a span some elements are looked at for their size; a smaller span says too little.
_SAMPLED_CHUNKS, _SAMPLE, _SMALLEST_SAMPLE = 4, 64, 1024
# In two values of bfloat16 the exponent of either is one of few bytes; what is cut off from float32 is random.
_FEW_EXPONENTS = 12
# One is read while another is summed; more do not pay on the machines that were tried.
_READERS = 2


class _FloatFormat(NamedTuple):
    """exponent: the bits of the highest byte that are all set in NaN and infinity. prefix: makes ``code`` of it."""

    exponent: int
    code: str
    prefix: bytes = b""


_SQUARES = ("exp_avg_sq", "max_exp_avg_sq")
_FLOATS = {
    "float64": _FloatFormat(0x7F, "<d"),
    "float32": _FloatFormat(0x7F, "<f"),
    "bfloat16": _FloatFormat(0x7F, "<f", bytes(2)),
    "float16": _FloatFormat(0x7C, "<e"),
    "float8_e5m2": _FloatFormat(0x7C, "<e", bytes(1)),
}


@dataclass(slots=True)
class SpanScan:
    """Facts about the bytes of a tensor's piece.

    crc: None where a hole was not read. first_bad: the number of the first element that is NaN or infinite.
    num_huge: finite, and beyond what any training reaches. num_negative: of what cannot be, a moment of squares.
    size: the mean of the magnitudes of a sample. looks_split: whether a sample looks like two values of bfloat16 in
    each of float32. zero_runs: ranges of bytes in the span that are zero and contain a page of the file; at most 1000.
    """

    nbytes: int
    crc: int | None = 0
    is_zero: bool = True
    num_nan: int = 0
    num_inf: int = 0
    num_minus_inf: int = 0
    num_huge: int = 0
    num_negative: int = 0
    size: float | None = None
    looks_split: bool = False
    first_bad: int | None = None
    zero_runs: list[tuple[int, int]] = field(default_factory=list)
    head: bytes = b""


@dataclass(slots=True)
class Scans:
    """spans: by file, first byte and length. nbytes: what was read. symptoms: files and members that are damaged."""

    spans: dict[SpanKey, SpanScan] = field(default_factory=dict)
    symptoms: list[Symptom] = field(default_factory=list)
    nbytes: int = 0

    def find(self, piece: SavedPiece, itemsize: int) -> SpanScan | None:
        return self.spans.get((piece.file, piece.begin, piece.span * itemsize))


def scan(checkpoint: SavedCheckpoint, progress: Callable[[int], None] | None = None, sink: Sink | None = None) -> Scans:
    """Reads every member and every piece once.

    progress: called by any thread with the number of bytes just read. sink: is given the bytes.

    Host memory: a few MiB for each of two readers, however large the checkpoint is.
    """
    pieces: dict[str, dict[tuple[int, int], _Place]] = defaultdict(dict)
    for state in checkpoint.states:
        for tensor in state.tensors.values():
            for piece in tensor.pieces:
                if piece.begin >= 0 and piece.numel:
                    pieces[piece.file][piece.begin, piece.span * tensor.itemsize] = _Place(tensor, piece)
    scans = Scans()

    def scan_file(saved: SavedFile) -> Scans:
        return _scan_file(checkpoint.root / saved.path, saved, pieces.get(saved.path, {}), progress, sink)

    with ThreadPoolExecutor(_READERS) as readers:
        for part in readers.map(scan_file, sorted(checkpoint.files.values(), key=lambda file: file.path)):
            scans.spans |= part.spans
            scans.symptoms += part.symptoms
            scans.nbytes += part.nbytes
    return scans


def _scan_file(
    path: pathlib.Path,
    saved: SavedFile,
    pieces: dict[tuple[int, int], _Place],
    progress: Callable[[int], None] | None,
    sink: Sink | None,
) -> Scans:
    scans = Scans()
    waiting = sorted(pieces.items(), key=lambda item: item[0], reverse=True)
    try:
        with OpenFile(path) as file:
            for member in sorted(saved.members, key=lambda member: member.begin):
                inside = []
                while waiting and waiting[-1][0][0] < member.begin + member.nbytes:
                    inside.append(waiting.pop())
                _scan_member(file, saved, member, inside, scans, progress, sink)
            if file.version != saved.version or file.has_changed():
                scans.symptoms.append(Symptom(Trouble.CHANGED, "it changed while it was read", saved.path))
    except BadFile as error:
        scans.symptoms.append(Symptom(Trouble.CHANGED, error.what, saved.path))
    except OSError as error:
        scans.symptoms.append(Symptom(Trouble.UNREAD, f"cannot be read: {error.strerror or error}", saved.path))
    return scans


def _scan_member(
    file: OpenFile,
    saved: SavedFile,
    member: Member,
    pieces: list[tuple[tuple[int, int], _Place]],
    scans: Scans,
    progress: Callable[[int], None] | None,
    sink: Sink | None,
) -> None:
    scanners = [
        _SpanScanner(begin, nbytes, place.tensor.dtype, is_square=place.tensor.last_name in _SQUARES)
        for (begin, nbytes), place in pieces
    ]
    crc: int | None = 0
    for begin, end, is_hole in file.find_extents(member.begin, member.begin + member.nbytes):
        if is_hole and end - begin > _LONGEST_HOLE:
            crc = None
            for scanner, (_, place) in zip(scanners, pieces, strict=True):
                scanner.skip(begin, end)
                what = f"{end - begin} bytes were never written"
                found = Symptom(Trouble.ZERO_BLOCK, what, saved.path, place.tensor.name, place.piece.rows)
                scans.symptoms.append(found)
            continue
        for offset, chunk in _read_chunks(file, begin, end):
            crc = crc32(chunk, crc) if crc is not None else None
            for scanner in scanners:
                scanner.feed(offset, chunk, sums=scanner.scan.nbytes != member.nbytes)
            if sink is not None:
                sink(saved.path, offset, chunk)
            scans.nbytes += len(chunk)
            if progress is not None:
                progress(len(chunk))
    for scanner in scanners:
        if scanner.scan.nbytes == member.nbytes:
            scanner.scan.crc = crc
        scans.spans[saved.path, scanner.begin, scanner.scan.nbytes] = scanner.scan
    if member.crc is None:
        return
    if crc != member.crc:
        actual = f"has the CRC-32 {crc:08x}" if crc is not None else "was never written for the most part"
        what = f"{member.name} {actual}, and {member.crc:08x} was saved"
        whose = [(place.tensor.name, place.piece.rows, place.piece.rank) for _, place in pieces]
        for name, rows, rank in whose or [("", None, None)]:
            scans.symptoms.append(Symptom(Trouble.CHECKSUM, what, saved.path, name, rows, rank))


def _read_chunks(file: OpenFile, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Computes the offsets of the parts; all except the first are aligned to a page."""
    while begin < end:
        length = min(end - begin, CHUNK_BYTES - begin % CHUNK_BYTES)
        yield begin, file.read(begin, length)
        begin += length


class _Place(NamedTuple):
    """Owner of the bytes."""

    tensor: SavedTensor
    piece: SavedPiece


class _SpanScanner:
    """Takes the bytes of a file in order, and looks at those of one span."""

    def __init__(self, begin: int, nbytes: int, dtype: str, *, is_square: bool = False) -> None:
        self.begin, self.end = begin, begin + nbytes
        self.scan = SpanScan(nbytes)
        self._float = _FLOATS.get(dtype)
        self._itemsize = DTYPES[dtype].itemsize
        self._tail = b""
        self._num_candidates = 0
        self._zeros_before = 0
        self._is_square = is_square and self._float is not None
        self._dtype = dtype
        self._sizes: list[float] = []
        self._sampled = 0

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
        if scan.is_zero:
            scan.is_zero = not chunk.strip(b"\0")
        self._find_zeros(place, chunk)
        if self._float is not None:
            self._find_nonfinite(self._float, place, chunk)
            if self._sampled < _SAMPLED_CHUNKS and place % self._itemsize == 0 and len(chunk) >= _SMALLEST_SAMPLE:
                self._sample(self._float, chunk)

    def _sample(self, form: _FloatFormat, chunk: bytes) -> None:
        self._sampled += 1
        size = self._itemsize
        step = max(len(chunk) // size // _SAMPLE, 1) * size
        parts = (chunk[at : at + size] for at in range(0, len(chunk) - size + 1, step))
        values = [abs(struct.unpack(form.code, form.prefix + part)[0]) for part in parts]
        self._sizes += [value for value in values if math.isfinite(value)]
        self.scan.size = sum(self._sizes) / len(self._sizes) if self._sizes else None
        if self._dtype == "float32" and self._sampled == 1:
            middle = Counter(byte & 0x7F for byte in chunk[1 : 4 * 1024 : 4])
            is_spread = len(set(chunk[0 : 4 * 1024 : 4])) > 16
            few = sum(count for _, count in middle.most_common(_FEW_EXPONENTS))
            self.scan.looks_split = is_spread and few > 0.98 * middle.total()

    def _find_nonfinite(self, form: _FloatFormat, place: int, chunk: bytes) -> None:
        size = self._itemsize
        head = min(-place % size, len(chunk))
        self._tail += chunk[:head]
        if len(self._tail) == size:
            self._find_candidates(form, self._tail, 0, place // size)
            self._tail = b""
        self._find_candidates(form, chunk, head, (place + head) // size)
        self._tail += chunk[head + (len(chunk) - head) // size * size :]

    def _find_candidates(self, form: _FloatFormat, data: bytes, begin: int, first: int) -> None:
        """Counts those of the whole elements from ``begin`` on; first: the number of the first of them."""
        size = self._itemsize
        bits = numpy.frombuffer(data, f"<u{size}", (len(data) - begin) // size, begin)
        if not len(bits):
            return
        if self._is_square:
            self.scan.num_negative += int(numpy.count_nonzero(bits.view(f"<i{size}") < 0))
        exponent, sign = form.exponent << 8 * (size - 1), 0x80 << 8 * (size - 1)
        if int(bits.view(f"<i{size}").max()) < exponent and int(bits.max()) < sign | exponent:
            return  # as for nearly all chunks, and this is found faster
        candidates = numpy.flatnonzero(bits & exponent == exponent)[: _MOST_CANDIDATES - self._num_candidates]
        for at in candidates.tolist():
            (value,) = struct.unpack(form.code, form.prefix + int(bits[at]).to_bytes(size, "little"))
            self._count(value, first + at)

    def _count(self, value: float, index: int) -> None:
        scan = self.scan
        if math.isfinite(value):
            if abs(value) > _HUGE:
                scan.num_huge += 1
                self._num_candidates += 1
                scan.first_bad = index if scan.first_bad is None else scan.first_bad
            return
        self._num_candidates += 1
        scan.num_nan += math.isnan(value)
        scan.num_inf += value == math.inf
        scan.num_minus_inf += value == -math.inf
        scan.first_bad = index if scan.first_bad is None else scan.first_bad

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
