"""Compares tensors in files with the checksums that ``save_full_tensors`` wrote into its marker file."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fsdp_doctor.checkpoints.files import BadFile
from fsdp_doctor.checkpoints.marker import MARKER, Marker, read_marker
from fsdp_doctor.checkpoints.sums import crc32, shift_crc
from fsdp_doctor.weights.load.outcome import LoadError
from fsdp_doctor.weights.load.safetensors_files import FileTensor
from fsdp_doctor.weights.transport.host_copies import count_threads

_MOST_THREADS = 16
# A thread that asks for the interpreter's lock once in so many bytes hardly waits for the others.
_CHUNK_BYTES = 4 << 20
# Threads share the pieces of a large tensor.
_PIECE_BYTES = 64 << 20


class Share(NamedTuple):
    """Share of the files that this rank compares: number ``part``, counted from 0, of ``num_parts``."""

    part: int
    num_parts: int


class _Expected(NamedTuple):
    name: str
    tensor: FileTensor
    sum: int


def find_share(ranks: Sequence[int], world_size: int) -> Share:
    """Returns this rank's share of the files. The ranks of a node divide them, because each node may have separate
    files.

    The share follows from torchrun's LOCAL_RANK and LOCAL_WORLD_SIZE. If these are unknown, or not all ranks load, each
    rank compares all files.
    """
    index, count = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if len(ranks) == world_size and index.isdecimal() and count.isdecimal() and int(index) < int(count):
        return Share(int(index), int(count))
    return Share(0, 1)


def check_sums(tensors: Mapping[str, FileTensor], share: Share) -> int:
    """Compares this rank's share of the tensors with their sums, and returns how many of all tensors have a sum.

    Raises LoadError for a tensor whose bytes differ, and for a tensor that is in a file with a marker but not in the
    marker.
    """
    expected = list(_list_expected(tensors))
    mine = _select_share(expected, share)
    pieces = [(one, begin) for one in mine for begin in range(one.tensor.begin, one.tensor.end, _PIECE_BYTES)]
    sums = {one.name: 0 for one in mine}
    with concurrent.futures.ThreadPoolExecutor(count_threads(_MOST_THREADS)) as threads:
        for (one, begin), found in zip(pieces, threads.map(lambda piece: _sum_piece(*piece), pieces), strict=True):
            sums[one.name] = shift_crc(sums[one.name], min(_PIECE_BYTES, one.tensor.end - begin)) ^ found
    differing = [one for one in mine if sums[one.name] != one.sum]
    if differing:
        first = differing[0]
        others = f", and {len(differing) - 1} others" if differing[1:] else ""
        raise LoadError(
            f"{first.tensor.file.path}: the bytes of {first.name}{others} differ from the saved bytes, by the "
            f"checksums in {MARKER}: restore the file, or load with check_sums=False if another program has "
            "written it since"
        )
    return len(expected)


def _list_expected(tensors: Mapping[str, FileTensor]) -> Iterable[_Expected]:
    markers: dict[pathlib.Path, Marker | None] = {}
    in_order = sorted(tensors.items(), key=lambda item: (str(item[1].file.path), item[1].begin))
    for name, tensor in in_order:
        directory, file = tensor.file.path.parent, tensor.file.path.name
        if directory not in markers:
            try:
                markers[directory] = read_marker(directory)
            except BadFile as error:
                raise LoadError(
                    f"{error.describe(directory / MARKER)}, so its checksums cannot be compared: restore the file, "
                    "or load with check_sums=False"
                ) from None
        marker = markers[directory]
        if marker is None or file not in marker.files:
            continue
        if name not in marker.files[file].sums:
            raise LoadError(
                f"{tensor.file.path}: {name} is not among the checksums in {MARKER}, so another program has "
                "written the file since: load with check_sums=False"
            )
        yield _Expected(name, tensor, marker.files[file].sums[name])


def _select_share(expected: Sequence[_Expected], share: Share) -> list[_Expected]:
    """Selects the tensors whose middle lies in this rank's part of all bytes."""
    total, before, selected = sum(one.tensor.nbytes for one in expected), 0, []
    for one in expected:
        middle = before + one.tensor.nbytes // 2
        if min(middle * share.num_parts // max(total, 1), share.num_parts - 1) == share.part:
            selected.append(one)
        before += one.tensor.nbytes
    return selected


def _sum_piece(expected: _Expected, first: int) -> int:
    """Computes the CRC-32 of the piece of a tensor that begins at the byte ``first`` of its file."""
    tensor, last, found = expected.tensor, min(first + _PIECE_BYTES, expected.tensor.end), 0
    chunk = memoryview(bytearray(min(_CHUNK_BYTES, last - first)))
    for begin in range(first, last, _CHUNK_BYTES):
        part = chunk[: min(_CHUNK_BYTES, last - begin)]
        tensor.file.read(begin, part)
        found = crc32(part, found)
    return found
