"""Safetensors files: validated headers, the index of a checkpoint of several files, and any range of their bytes.

Files are read with pread and not mapped: to touch a mapped page behind the end of a truncated file kills the process.
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
# The limit of the safetensors package.
_LONGEST_HEADER = 100_000_000
_LENGTH_BYTES = 8


class SafetensorsFile:
    """One open file and its tensors by name.

    Raises LoadError for another kind of file and for a truncated one, OSError if it cannot be read.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        # To open a pipe without O_NONBLOCK might wait forever.
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise LoadError(f"{path} is no file")
            self._version = _version_of(status)
            self.tensors = self._read_header(status.st_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, offset: int, into: memoryview) -> None:
        """Fills ``into`` with the bytes of the file from ``offset`` on. Any thread may call it."""
        while into:
            count = os.preadv(self._fd, [into], offset)
            if not count:
                raise LoadError(f"{self.path} has become shorter while it was read: it ends at byte {offset}")
            offset, into = offset + count, into[count:]

    def check_unchanged(self) -> None:
        """Raises LoadError if the file was written to or replaced since it was opened.

        A file that was removed is fine: all that was read is still of one version.
        """
        states = [os.fstat(self._fd)]
        with contextlib.suppress(FileNotFoundError):
            states.append(os.stat(self.path))
        if any(_version_of(state) != self._version for state in states):
            raise LoadError(
                f"{self.path} has changed while it was read, so what was loaded may be a mixture of two checkpoints: "
                "load again when nothing writes to it"
            )

    def _read_header(self, size: int) -> dict[str, FileTensor]:
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
            header = json.loads(data, object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:
            raise LoadError(f"{self.path} is no safetensors file: its header is no JSON ({error})") from None
        if not isinstance(header, dict):
            raise LoadError(f"{self.path} is no safetensors file: its header is no JSON object")
        header.pop("__metadata__", None)
        tensors = {name: self._tensor(name, entry, begin, size) for name, entry in header.items()}
        in_order = sorted((tensor.begin, tensor.end, name) for name, tensor in tensors.items())
        for (_, end, name), (start, _, other) in itertools.pairwise(in_order):
            if start < end:
                raise LoadError(f"{self.path}: {name} and {other} lie in the same bytes")
        return tensors

    def _tensor(self, name: str, entry: Any, begin: int, size: int) -> FileTensor:
        entry = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise LoadError(f"{self.path}: {name} has the unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
        if not _are_counts(shape):
            raise LoadError(f"{self.path}: {name} has the shape {shape!r}, which is not a list of lengths")
        if not _are_counts(offsets) or len(offsets) != 2:
            raise LoadError(f"{self.path}: {name} has the offsets {offsets!r}, which are not a first and a last byte")
        first, last = offsets
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        if last - first != nbytes:
            raise LoadError(f"{self.path}: {name} has {last - first} bytes, and its shape {shape} takes {nbytes}")
        if begin + last > size:
            raise LoadError(f"{self.path} is truncated: it has {size} bytes, {name} ends at byte {begin + last}")
        return FileTensor(self, begin + first, torch.Size(shape), DTYPES[dtype])


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A full tensor in a file. begin: the offset of its first byte."""

    file: SafetensorsFile
    begin: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.begin + self.shape.numel() * self.dtype.itemsize


def open_files(path: pathlib.Path) -> tuple[list[SafetensorsFile], dict[str, FileTensor]]:
    """Opens a file, or the files of a directory (those of its index if it has one), and lists their tensors by name."""
    index: dict[str, str] = {}
    paths: Iterable[pathlib.Path] = [path]
    if path.is_dir():
        index = read_index(path, "safetensors")
        paths = [path / name for name in sorted(set(index.values()))] if index else sorted(path.glob("*.safetensors"))
        if absent := [str(file) for file in paths if index and not file.exists()]:
            raise LoadError(f"the index of {path} names files that are not there: {some(absent)}")
        if not paths:
            raise LoadError(f"{path} holds no safetensors file")
    with contextlib.ExitStack() as on_error:
        files = []
        for each in paths:
            files.append(SafetensorsFile(each))
            on_error.callback(files[-1].close)
        tensors = dict(_tensors_of(path, files, index))
        on_error.pop_all()
        return files, tensors


def read_index(directory: pathlib.Path, suffix: str) -> dict[str, str]:
    """The name of each tensor's file, as transformers writes it; empty without an index, and if there are several.

    suffix: of the files, such as ``safetensors``. Raises LoadError if the index is malformed or names files outside of
    the directory, OSError if it cannot be read.
    """
    indexes = sorted(directory.glob(f"*.{suffix}.index.json"))
    if len(indexes) != 1:
        return {}
    # To read a pipe might wait forever.
    if not indexes[0].is_file():
        raise LoadError(f"{indexes[0]} is no file")
    try:
        text = indexes[0].read_text(encoding="utf-8")
        weight_map = json.loads(text, object_pairs_hook=_without_duplicates)["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LoadError(f"{indexes[0]} is no index of a checkpoint: {error!r}") from None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise LoadError(f"{indexes[0]} is no index of a checkpoint: its weight_map does not map names to files")
    outside = {name for name in weight_map.values() if name in ("", "..") or pathlib.PurePath(name).name != name}
    if outside:
        raise LoadError(
            f"{indexes[0]} names files outside of its directory: {some(sorted(name or repr(name) for name in outside))}"
        )
    return weight_map


def _tensors_of(
    path: pathlib.Path, files: list[SafetensorsFile], index: dict[str, str]
) -> Iterator[tuple[str, FileTensor]]:
    file_of: dict[str, pathlib.Path] = {}
    for file in files:
        names = {name for name, where in index.items() if where == file.path.name} if index else set(file.tensors)
        if lacking := sorted(names - set(file.tensors)):
            raise LoadError(f"{file.path} does not hold what the index of {path} says: {some(lacking)}")
        for name, tensor in file.tensors.items():
            if name in names:
                if name in file_of:
                    raise LoadError(f"{name} is in {file_of[name]} and in {file.path}")
                file_of[name] = file.path
                yield name, tensor


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("it has a name twice")
    return entries


def _version_of(file: os.stat_result) -> tuple[int, int, int, int]:
    return file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and {int}.issuperset(map(type, value)) and min(value, default=0) >= 0
