"""Safetensors files: their headers, checked, and any range of their tensors.

Read with pread, not through a map of the file: a page of a map that has gone with the file's end ends the process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pathlib
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_doctor.errors import some
from fsdp_doctor.load.checkpoint_index import read_index
from fsdp_doctor.load.outcome import LoadError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
if hasattr(torch, "float8_e8m0fnu"):  # From torch 2.7 on.
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
# As the safetensors package has it.
_LONGEST_HEADER = 100_000_000
_LENGTH_BYTES = 8


class SafetensorsFile:
    """One open file. Raises LoadError if it is none, or a part of it is missing; OSError if it cannot be read."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        # What is no file, such as a pipe, might never be opened.
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            opened = os.fstat(self._fd)
            if not stat.S_ISREG(opened.st_mode):
                raise LoadError(f"{path} is no file")
            self._version = _version_of(opened)
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, offset: int, into: memoryview) -> None:
        """Bytes from ``offset`` of the file on, as many as there is room for. Any thread may call it."""
        while into:
            count = os.preadv(self._fd, [into], offset)
            if not count:
                raise LoadError(f"{self.path} has become shorter while it was read: it ends at byte {offset}")
            offset, into = offset + count, into[count:]

    def check_unchanged(self) -> None:
        """Raises LoadError where the file was written to, or another put in its place, since it was opened.

        Where it was removed, all that was read is still of the one file.
        """
        found = [os.fstat(self._fd)]
        with contextlib.suppress(FileNotFoundError):
            found.append(os.stat(self.path))
        if any(_version_of(one) != self._version for one in found):
            raise LoadError(
                f"{self.path} has changed while it was read, so that what was loaded may be of two checkpoints: load "
                "again when nothing writes to it"
            )

    def _read_header(self) -> dict[str, FileTensor]:
        size = os.fstat(self._fd).st_size
        if size < _LENGTH_BYTES:
            raise LoadError(f"{self.path} is no safetensors file: it has {size} bytes")
        length = int.from_bytes(os.pread(self._fd, _LENGTH_BYTES, 0), "little")
        if not 2 <= length <= _LONGEST_HEADER:
            raise LoadError(f"{self.path} is no safetensors file: its header would be {length} bytes long")
        begin = _LENGTH_BYTES + length
        if begin > size:
            raise LoadError(f"{self.path} is truncated, or no safetensors file: {size} bytes, and a header of {length}")
        data = bytearray(length)
        self.read(_LENGTH_BYTES, memoryview(data))
        try:
            header = json.loads(data, object_pairs_hook=self._without_duplicates)
        except (ValueError, RecursionError) as error:
            raise LoadError(f"{self.path} is no safetensors file: its header is no JSON ({error})") from None
        if not isinstance(header, dict):
            raise LoadError(f"{self.path} is no safetensors file: its header is no JSON object")
        header.pop("__metadata__", None)
        tensors = {name: self._tensor(name, about, begin, size) for name, about in header.items()}
        in_order = sorted((one.begin, one.end, name) for name, one in tensors.items())
        for (_, end, name), (start, _, other) in itertools.pairwise(in_order):
            if start < end:
                raise LoadError(f"{self.path}: {name} and {other} lie in the same bytes")
        return tensors

    def _without_duplicates(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise LoadError(f"{self.path} has a name twice in its header")
        return found

    def _tensor(self, name: str, about: Any, begin: int, size: int) -> FileTensor:
        about = about if isinstance(about, dict) else {}
        dtype, shape, offsets = about.get("dtype"), about.get("shape"), about.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise LoadError(f"{self.path}: {name} has the dtype {dtype!r}, which is none of {', '.join(DTYPES)}")
        if not _are_counts(shape):
            raise LoadError(f"{self.path}: {name} has the shape {shape!r}, which is none")
        if not _are_counts(offsets) or len(offsets) != 2:
            raise LoadError(f"{self.path}: {name} has the offsets {offsets!r}, which are none")
        first, last = offsets
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        if last - first != nbytes:
            raise LoadError(f"{self.path}: {name} has {last - first} bytes, and its shape {shape} takes {nbytes}")
        if begin + last > size:
            raise LoadError(f"{self.path} is truncated: it has {size} bytes, {name} ends at byte {begin + last}")
        return FileTensor(self, begin + first, torch.Size(shape), DTYPES[dtype])


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A full tensor in a file. begin: the first of its bytes there."""

    file: SafetensorsFile
    begin: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.begin + self.shape.numel() * self.dtype.itemsize


def open_files(path: pathlib.Path) -> tuple[list[SafetensorsFile], dict[str, FileTensor]]:
    """One file, or all of a directory, or those of its index where it has one; what they hold, by name."""
    index: dict[str, str] = {}
    paths: Iterable[pathlib.Path] = [path]
    if path.is_dir():
        index = read_index(path, "safetensors")
        paths = [path / name for name in sorted(set(index.values()))] if index else sorted(path.glob("*.safetensors"))
        if absent := [str(file) for file in paths if index and not file.exists()]:
            raise LoadError(f"the index of {path} names files that are not there: {some(absent)}")
        if not paths:
            raise LoadError(f"{path} holds no safetensors file")
    files: list[SafetensorsFile] = []
    try:
        files += _opened(paths)
        return files, _all_tensors(path, files, index)
    except BaseException:
        for file in files:
            file.close()
        raise


def _opened(paths: Iterable[pathlib.Path]) -> Iterator[SafetensorsFile]:
    for path in paths:
        yield SafetensorsFile(path)


def _all_tensors(path: pathlib.Path, files: list[SafetensorsFile], index: dict[str, str]) -> dict[str, FileTensor]:
    found: dict[str, FileTensor] = {}
    for file in files:
        of_index = {name for name, where in index.items() if where == file.path.name}
        if lacking := sorted(of_index - set(file.tensors)):
            raise LoadError(f"{file.path} does not hold what the index of {path} says: {some(lacking)}")
        for name, tensor in file.tensors.items():
            if index and name not in of_index:
                continue
            if name in found:
                raise LoadError(f"{name} is in {found[name].file.path} and in {file.path}")
            found[name] = tensor
    return found


def _version_of(file: os.stat_result) -> tuple[int, int, int, int]:
    return file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and {int}.issuperset(map(type, value)) and min(value, default=0) >= 0
