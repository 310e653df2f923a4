"""Copies the bytes of tensors from a checkpoint to the files of a layout, and reads the written bytes back."""

from __future__ import annotations

import bisect
import itertools
import math
import os
import pathlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fsdp_doctor.checkpoints.archives import ArchiveMember
from fsdp_doctor.checkpoints.dtypes import DTYPES
from fsdp_doctor.checkpoints.files import CHUNK_BYTES, BadFile
from fsdp_doctor.checkpoints.record import SavedPiece
from fsdp_doctor.checkpoints.sums import crc32, shift_crc
from fsdp_doctor.checkpoints.target_directory import ConversionError
from fsdp_doctor.checkpoints.targets import FilePlan, Slot, TensorToWrite
from fsdp_doctor.errors import DoctorFault


@dataclass(slots=True)
class _Cast:
    """Casts elements that arrive in chunks. ``rest`` holds the bytes of an incomplete element at a chunk's end."""

    function: Callable[[bytes], bytes]
    from_bytes: int
    to_bytes: int
    rest: bytes = b""


@dataclass(slots=True)
class _Route:
    """Destination of a piece's bytes. The piece consists of runs of ``run`` bytes that are contiguous in the tensor.

    ``begin`` is the piece's offset in its file. ``first`` is the byte of the tensor at which the piece begins.
    ``outer`` lists (length, stride in bytes) of each dim outside the runs. ``ends`` are the end offsets of the slots.
    ``done`` counts the bytes that have arrived. ``crc`` covers the bytes written to the current slot so far.
    """

    begin: int
    nbytes: int
    first: int
    run: int
    outer: list[tuple[int, int]]
    slots: list[Slot]
    ends: list[int]
    cast: _Cast | None
    done: int = 0
    crc: int = 0

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

    @property
    def end(self) -> int:
        """Number of bytes of the piece after the cast."""
        return self.nbytes if self.cast is None else self.nbytes * self.cast.to_bytes // self.cast.from_bytes

    def divide(self, begin: int, end: int) -> Iterator[tuple[int, int, Slot, int]]:
        """Yields the ranges to write for the bytes from ``begin`` to ``end`` of the piece.

        Each range is (offset in the cast piece, offset in the slot, slot, length).
        """
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
    """Files of a layout in a new directory, filled with the bytes of a checkpoint.

    Each write is immediately read back and compared, while the data is still in the processor's cache. A later
    comparison would see the same bytes, since no byte of a file is written twice.

    Raises ConversionError if there is not enough space, and BadFile for a tensor that is stored with gaps.
    """

    def __init__(self, directory: pathlib.Path, layout: FilePlan, cast: Callable[[str, str], Callable[[bytes], bytes]]):
        self._directory, self._layout = directory, layout
        self._fds: list[int] = []
        self._lock, self._of_thread = threading.Lock(), threading.local()
        # Members whose bytes do not arrive in order, with their files.
        self._unordered: dict[int, tuple[ArchiveMember, int]] = {}
        self._routes: dict[str, list[_Route]] = defaultdict(list)
        for tensor, slots in layout.slots.values():
            for piece in {(p.offsets, p.shape): p for p in reversed(tensor.saved.pieces) if p.numel}.values():
                if piece.begin < 0 or not piece.is_contiguous:
                    raise BadFile(
                        "is stored with gaps between its elements, or packed, and cannot be converted",
                        tensor.saved.name,
                    )
                sizes = DTYPES[tensor.saved.dtype].itemsize, tensor.itemsize
                differs = tensor.dtype != tensor.saved.dtype
                change = _Cast(cast(tensor.saved.dtype, tensor.dtype), *sizes) if differs else None
                self._routes[piece.file].append(_Route.make(tensor, piece, slots, change))
        for routes in self._routes.values():
            routes.sort(key=lambda route: route.begin)
        _check_disjoint(layout)
        # Files are read in order, so the routes before this index are complete.
        self._next = dict.fromkeys(self._routes, 0)
        room, needed = os.statvfs(directory), layout.num_bytes
        if (free := room.f_bavail * room.f_frsize) < needed:
            raise ConversionError(f"{directory.parent} has {free} bytes left, but {needed} bytes are needed")
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
        """Writes bytes of a source file to their destinations. Each byte must be passed once, in the file's order."""
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
                route.done += last - begin
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
            origin = begin * cast.to_bytes // cast.from_bytes
        for source, inside, slot, length in route.divide(begin, end):
            part = data[source - origin : source - origin + length]
            for place in slot.places:
                self._write(place.file, part, place.begin + inside)
            if any(place.member is not None for place in slot.places):
                is_last = inside + length == slot.nbytes or source + length == route.end
                self._sum(route, part, slot, slot.nbytes - inside - length, is_last=is_last)

    def _sum(self, route: _Route, part: memoryview, slot: Slot, nbytes_behind: int, *, is_last: bool) -> None:
        """Adds the bytes to the checksums of the members that contain the slot. Several source files may contribute to
        a slot.
        """
        if route.outer:
            self._unordered |= {id(place.member): (place.member, place.file) for place in slot.places if place.member}
            return
        route.crc = crc32(part, route.crc)
        if is_last:
            with self._lock:
                for place in slot.places:
                    if place.member is not None:
                        place.member.crc ^= shift_crc(route.crc, nbytes_behind)
            route.crc = 0

    def _write(self, number: int, data: bytes | memoryview, place: int) -> None:
        name, view, at = self._layout.files[number].name, memoryview(data), place
        while view:
            try:
                count = os.pwrite(self._fds[number], view, at)
            except OSError as error:
                raise ConversionError(f"cannot write {self._directory / name}: {error.strerror or error}") from None
            view, at = view[count:], at + count
        back: bytearray = getattr(self._of_thread, "buffer", bytearray())
        if len(back) != len(data):
            back = self._of_thread.buffer = bytearray(len(data))
        # startswith is enough, since the lengths are equal; == would compare a memoryview element by element.
        if os.preadv(self._fds[number], [back], place) != len(data) or not back.startswith(data):
            raise ConversionError(f"{name} does not contain the written data from byte {place} on")

    def finish(self) -> None:
        """Completes the checksums and syncs all files. Raises ConversionError if bytes of the source are missing."""
        for path, routes in self._routes.items():
            if any(route.done < route.nbytes for route in routes):
                raise ConversionError(f"{path} was not read to its end")
        for member, number in self._unordered.values():
            member.crc = 0
            for at in range(member.begin, member.begin + member.nbytes, CHUNK_BYTES):
                nbytes = min(CHUNK_BYTES, member.begin + member.nbytes - at)
                member.crc = crc32(os.pread(self._fds[number], nbytes, at), member.crc)
        for number, file in enumerate(self._layout.files):
            for archive in file.archives:
                for begin, text in archive.encode():
                    self._write(number, text, begin)
            os.fsync(self._fds[number])


def _check_disjoint(layout: FilePlan) -> None:
    ranges = [
        (place.file, place.begin, place.begin + slot.nbytes)
        for _, slots in layout.slots.values()
        for slot in slots
        for place in slot.places
    ]
    for number, planned in enumerate(layout.files):
        texts = itertools.chain(planned.texts, *(archive.encode() for archive in planned.archives))
        ranges += [(number, begin, begin + len(text)) for begin, text in texts]
    for (file, _, end), (other, begin, _) in itertools.pairwise(sorted(ranges)):
        if file == other and begin < end:
            raise DoctorFault(f"two parts of {layout.files[file].name} would begin at byte {begin}")
