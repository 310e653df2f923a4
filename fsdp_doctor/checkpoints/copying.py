"""Copies the bytes of tensors from a checkpoint to the files of a layout, and compares what was written."""

from __future__ import annotations

import bisect
import itertools
import math
import os
import pathlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fsdp_doctor.checkpoints.archives import ArchiveMember
from fsdp_doctor.checkpoints.dtypes import DTYPES
from fsdp_doctor.checkpoints.files import CHUNK_BYTES, BadFile
from fsdp_doctor.checkpoints.record import SavedPiece
from fsdp_doctor.checkpoints.scanning import Scans
from fsdp_doctor.checkpoints.sums import crc32, shift_crc
from fsdp_doctor.checkpoints.targets import FilePlan, PlaceToWrite, Slot, TensorToWrite

# One reads while another sums.
_READERS = 2


class ConversionError(Exception):
    """Nothing was converted; the message is one sentence that says why."""


@dataclass(slots=True)
class _Cast:
    """A cast of elements that come in chunks. rest: the bytes of one that came in part. crc: of all cast so far."""

    function: Callable[[bytes], bytes]
    from_bytes: int
    to_bytes: int
    rest: bytes = b""
    crc: int = 0


@dataclass(slots=True)
class _Route:
    """A piece in its file, and where it goes: its bytes are runs of ``run`` bytes in those of the whole tensor.

    first: the byte of the tensor with which the piece begins. outer: lengths and distances in bytes of the dims before
    those that a run covers. ends: of the slots.
    """

    begin: int
    nbytes: int
    first: int
    run: int
    outer: list[tuple[int, int]]
    slots: list[Slot]
    ends: list[int]
    cast: _Cast | None

    @classmethod
    def make(cls, tensor: TensorToWrite, piece: SavedPiece, slots: list[Slot], cast: _Cast | None) -> _Route:
        itemsize, whole = tensor.saved.itemsize, tensor.shape
        distances = [math.prod(whole[dim + 1 :]) * itemsize for dim in range(len(whole))]
        first = sum(offset * distance for offset, distance in zip(piece.offsets, distances, strict=True))
        split = len(piece.shape)
        while split and (split == len(piece.shape) or piece.shape[split] == whole[split]):
            split -= 1
        run = math.prod(piece.shape[split:]) * itemsize
        outer = list(zip(piece.shape[:split], distances[:split], strict=True))
        ends = [slot.first + slot.nbytes for slot in slots]
        return cls(piece.begin, piece.numel * itemsize, first, run, outer, slots, ends, cast)

    def divide(self, begin: int, end: int) -> Iterator[tuple[int, int, Slot, int]]:
        """(offset in the piece as it is written, offset in the slot, slot, length) between two offsets in the piece."""
        scale = (self.cast.to_bytes, self.cast.from_bytes) if self.cast is not None else (1, 1)
        while begin < end:
            index, inside = divmod(begin, self.run)
            first = self.first + inside
            for length, distance in reversed(self.outer):
                index, at = divmod(index, length)
                first += at * distance
            nbytes = min(self.run - inside, end - begin)
            source, place, left = (each * scale[0] // scale[1] for each in (begin, first, nbytes))
            for number in itertools.count(bisect.bisect_right(self.ends, place)):
                slot = self.slots[number]
                length = min(self.ends[number] - place, left)
                yield source, place - slot.first, slot, length
                source, place, left = source + length, place + length, left - length
                if not left:
                    break
            begin += nbytes


class Copy:
    """The files of a layout in a new directory, to which the bytes of a checkpoint are written.

    Raises ConversionError if there is no room, BadFile for a tensor that is stored with gaps.
    """

    def __init__(self, directory: pathlib.Path, layout: FilePlan, cast: Callable[[str, str], Callable[[bytes], bytes]]):
        self._directory, self._layout = directory, layout
        self._fds: list[int] = []
        self._lock = threading.Lock()
        self._routes: dict[str, list[_Route]] = defaultdict(list)
        for tensor, slots in layout.slots.values():
            for piece in {(p.offsets, p.shape): p for p in reversed(tensor.saved.pieces) if p.numel}.values():
                if piece.begin < 0 or not piece.is_contiguous:
                    raise BadFile(
                        "is stored with gaps between its elements, or packed, which is not converted", tensor.saved.name
                    )
                sizes = DTYPES[tensor.saved.dtype].itemsize, tensor.itemsize
                differs = tensor.dtype != tensor.saved.dtype
                change = _Cast(cast(tensor.saved.dtype, tensor.dtype), *sizes) if differs else None
                self._routes[piece.file].append(_Route.make(tensor, piece, slots, change))
        for routes in self._routes.values():
            routes.sort(key=lambda route: route.begin)
        # A file is read in order: routes before it are done.
        self._next = dict.fromkeys(self._routes, 0)
        room, needed = os.statvfs(directory), layout.num_bytes
        if (free := room.f_bavail * room.f_frsize) < needed:
            raise ConversionError(f"{directory.parent} has {free} bytes left, and {needed} are needed")
        try:
            for number, file in enumerate(layout.files):
                path = directory / file.name
                self._fds.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
                os.ftruncate(self._fds[-1], file.nbytes)
                for begin, text in file.texts:
                    self._write(number, text, begin)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def write(self, path: str, offset: int, chunk: bytes) -> None:
        """Bytes of a file of the source, of which each is given once, in order."""
        routes = self._routes.get(path, ())
        end, view = offset + len(chunk), memoryview(chunk)
        first = self._next.get(path, 0)
        while first < len(routes) and routes[first].begin + routes[first].nbytes <= offset:
            first += 1
        if path in self._next:
            self._next[path] = first
        for route in itertools.takewhile(lambda route: route.begin < end, itertools.islice(routes, first, None)):
            begin, last = max(offset, route.begin), min(end, route.begin + route.nbytes)
            if begin < last:
                self._write_piece(route, begin - route.begin, view[begin - offset : last - offset])

    def _write_piece(self, route: _Route, begin: int, data: memoryview) -> None:
        end = begin + len(data)
        origin = begin
        if (cast := route.cast) is not None:
            whole = cast.rest + bytes(data)
            begin -= len(cast.rest)
            end -= len(whole) % cast.from_bytes
            cast.rest = whole[end - begin :]
            data = memoryview(cast.function(whole[: end - begin]))
            cast.crc = crc32(data, cast.crc)
            origin = begin * cast.to_bytes // cast.from_bytes
        for source, inside, slot, length in route.divide(begin, end):
            for place in slot.places:
                self._write(place.file, data[source - origin : source - origin + length], place.begin + inside)

    def _write(self, number: int, data: bytes | memoryview, place: int) -> None:
        view = memoryview(data)
        while view:
            try:
                count = os.pwrite(self._fds[number], view, place)
            except OSError as error:
                file = self._directory / self._layout.files[number].name
                raise ConversionError(f"cannot write {file}: {error.strerror or error}") from None
            view, place = view[count:], place + count

    def compare(self, scans: Scans) -> None:
        """Reads what was written, and sets the checksums of archives.

        Raises ConversionError if it is not what was read.
        """
        in_runs: dict[int, tuple[ArchiveMember, int]] = {}
        with ThreadPoolExecutor(_READERS) as readers:
            for of_file in readers.map(lambda path: self._compare_file(path, scans), list(self._routes)):
                in_runs |= of_file
        for member, number in in_runs.values():
            member.crc = self._sum(number, member.begin, member.nbytes)

    def _compare_file(self, path: str, scans: Scans) -> dict[int, tuple[ArchiveMember, int]]:
        """The members that are to be summed as a whole, with their files: what came from this one came in runs."""
        in_runs = {}
        for route in self._routes[path]:
            crc = 0
            for _, inside, slot, length in route.divide(0, route.nbytes):
                parts = [self._sum(place.file, place.begin + inside, length) for place in slot.places]
                if len(set(parts)) > 1:
                    raise self._complain(slot.places[0])
                crc = shift_crc(crc, length) ^ parts[0]
                for place in slot.places:
                    if (member := place.member) is not None and route.outer:
                        in_runs[id(member)] = member, place.file
                    elif member is not None:
                        with self._lock:  # a member may come from several files
                            member.crc ^= shift_crc(parts[0], slot.nbytes - inside - length)
            expected = scans.spans[path, route.begin, route.nbytes].crc if route.cast is None else route.cast.crc
            if crc != expected:
                raise self._complain(route.slots[0].places[0])
        return in_runs

    def _sum(self, number: int, begin: int, nbytes: int) -> int:
        crc = 0
        for at in range(begin, begin + nbytes, CHUNK_BYTES):
            crc = crc32(os.pread(self._fds[number], min(CHUNK_BYTES, begin + nbytes - at), at), crc)
        return crc

    def _complain(self, place: PlaceToWrite) -> ConversionError:
        name = self._layout.files[place.file].name
        return ConversionError(f"{name} did not keep what was written to it, from byte {place.begin} on")

    def finish(self) -> None:
        """Makes all of it last."""
        for number, file in enumerate(self._layout.files):
            for archive in file.archives:
                for begin, text in archive.encode():
                    self._write(number, text, begin)
            os.fsync(self._fds[number])
