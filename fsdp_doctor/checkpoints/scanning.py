"""Reads all bytes of a checkpoint once, in order and in bounded memory, to find bad checksums, zeros and non-finite
values.
"""

from __future__ import annotations

import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from fsdp_doctor.checkpoints.files import CHUNK_BYTES, BadFile, OpenFile
from fsdp_doctor.checkpoints.parts import MASTER
from fsdp_doctor.checkpoints.record import Member, SavedCheckpoint, SavedFile, SavedPiece, SavedTensor
from fsdp_doctor.checkpoints.spans import SpanScan, SpanScanner
from fsdp_doctor.checkpoints.sums import crc32
from fsdp_doctor.checkpoints.troubles import Symptom, Trouble

SpanKey: TypeAlias = tuple[str, int, int]
# Called from any thread with the file, the offset in the file, and the bytes.
Sink: TypeAlias = Callable[[str, int, bytes], None]
# A longer hole in a sparse file is skipped: reading it would take hours and yield only zeros.
_LONGEST_HOLE = 64 << 20
# One chunk is read while another is summed. More readers were not faster on the machines that were tried.
_READERS = 2
# Samples are kept only for tensors that may be tied, and in directories that may hold other copies of the model.
_MAY_BE_TIED = re.compile(r"(?:^|\.)(?:shared|embed_tokens|wte|lm_head)\.weight$")
_MOST_SAMPLED = 20_000


@dataclass(slots=True)
class Scans:
    """Results of a scan.

    ``spans`` holds the facts about each piece, by file, first byte and length. ``symptoms`` are damaged files and
    members. ``nbytes`` counts the bytes read.
    """

    spans: dict[SpanKey, SpanScan] = field(default_factory=dict)
    symptoms: list[Symptom] = field(default_factory=list)
    nbytes: int = 0

    def find(self, piece: SavedPiece, itemsize: int) -> SpanScan | None:
        return self.spans.get((piece.file, piece.begin, piece.span * itemsize))


def scan(checkpoint: SavedCheckpoint, progress: Callable[[int], None] | None = None, sink: Sink | None = None) -> Scans:
    """Reads all stored members once, and returns the facts about each piece.

    ``progress`` may be called from any thread, with the number of bytes just read. ``sink`` receives the bytes.

    Host memory: a few MiB for each of two readers, however large the checkpoint is.
    """
    pieces: dict[str, dict[tuple[int, int], _Place]] = defaultdict(dict)
    with_copies = _list_with_copies(checkpoint)
    for state in checkpoint.states:
        for tensor in state.tensors.values():
            keeps_sample = state.directory in with_copies or bool(_MAY_BE_TIED.search(tensor.name))
            for piece in tensor.pieces:
                if piece.begin >= 0 and piece.numel:
                    place = _Place(tensor, piece, keeps_sample)
                    pieces[piece.file][piece.begin, piece.span * tensor.itemsize] = place
    scans = Scans()

    def scan_file(saved: SavedFile) -> Scans:
        return _scan_file(checkpoint.root / saved.path, saved, pieces.get(saved.path, {}), progress, sink)

    with ThreadPoolExecutor(_READERS) as readers:
        for part in readers.map(scan_file, sorted(checkpoint.files.values(), key=lambda file: file.path)):
            scans.spans |= part.spans
            scans.symptoms += part.symptoms
            scans.nbytes += part.nbytes
    return scans


def _list_with_copies(checkpoint: SavedCheckpoint) -> set[str]:
    """Lists the directories that may hold float32 master weights and have few enough pieces to sample each."""
    num_pieces: Counter[str] = Counter()
    found = set()
    for state in checkpoint.states:
        num_pieces[state.directory] += sum(len(tensor.pieces) for tensor in state.tensors.values())
        labels = [state.label, *state.left_out, *{tensor.last_name for tensor in state.select("optimizer")}]
        if any(MASTER.search(label) for label in labels):
            found.add(state.directory)
    return {directory for directory in found if num_pieces[directory] <= _MOST_SAMPLED}


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
                scans.symptoms.append(Symptom(Trouble.CHANGED, "the file changed while it was read", saved.path))
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
        SpanScanner(begin, nbytes, place.tensor, place.piece, keeps_sample=place.keeps_sample)
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
        scans.spans[saved.path, scanner.begin, scanner.scan.nbytes] = scanner.finish()
    if member.crc is None:
        return
    if crc != member.crc:
        actual = f"has the CRC-32 {crc:08x}" if crc is not None else "was mostly never written"
        what = f"{member.name} {actual}, but {member.crc:08x} was saved"
        whose = [(place.tensor.name, place.piece.rows, place.piece.rank) for _, place in pieces]
        for name, rows, rank in whose or [("", None, None)]:
            scans.symptoms.append(Symptom(Trouble.CHECKSUM, what, saved.path, name, rows, rank))


def _read_chunks(file: OpenFile, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yields chunks of the file with their offsets. All chunks except the first begin at a page boundary."""
    while begin < end:
        length = min(end - begin, CHUNK_BYTES - begin % CHUNK_BYTES)
        yield begin, file.read(begin, length)
        begin += length


class _Place(NamedTuple):
    """The tensor and the piece to which a range of bytes belongs."""

    tensor: SavedTensor
    piece: SavedPiece
    keeps_sample: bool
