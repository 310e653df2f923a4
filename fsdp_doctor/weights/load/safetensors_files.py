"""Safetensors files: validated headers, the index of a checkpoint of several files, and reads of any range of bytes.

Files are read with pread and not mapped, because touching a mapped page behind the end of a truncated file kills the
process.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fsdp_doctor.checkpoints.files import BadFile, OpenFile
from fsdp_doctor.checkpoints.safetensors_files import read_header, read_weight_map
from fsdp_doctor.text import join_some
from fsdp_doctor.weights.load.outcome import LoadError

_TORCH_LOAD = (
    'read files of torch.save with torch.load(file, map_location="cpu", mmap=True, weights_only=True), without mmap if '
    "they are older than torch 1.6, and pass the dictionary that has the weights"
)
_TORCH_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})
_ZIP, _PICKLE_PROTOCOLS = b"PK\x03\x04", range(2, 6)


class SafetensorsFile:
    """Open file, and its tensors by name.

    Raises LoadError if the file is absent, truncated or in another format, or cannot be opened.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        with _raise_load_errors(path), contextlib.ExitStack() as on_error:
            with _refuse_unopened(path):
                self._file = OpenFile(path)
            on_error.callback(self._file.close)
            try:
                entries = read_header(self._file).tensors
            except BadFile:
                _refuse_torch_file(self._file)
                raise
            self.tensors = {
                name: FileTensor(self, entry.begin, torch.Size(entry.shape), _get_torch_dtype(name, entry.dtype))
                for name, entry in entries.items()
            }
            on_error.pop_all()

    def close(self) -> None:
        self._file.close()

    def read(self, offset: int, into: memoryview) -> None:
        """Fills ``into`` with the bytes of the file from ``offset`` on. Any thread may call it."""
        with _raise_load_errors(self.path):
            self._file.read_into(offset, into)

    def check_unchanged(self) -> None:
        """Raises LoadError if the file was written to or replaced since it was opened.

        A removed file raises no error, because all bytes that were read are from one version.
        """
        if self._file.has_changed():
            raise LoadError(
                f"{self.path} changed while it was read, so the loaded weights may be a mixture of two "
                "checkpoints: load again when nothing writes to the file"
            )


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Full tensor in a file.

    begin: the offset of the tensor's first byte.
    """

    file: SafetensorsFile
    begin: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


def open_files(path: pathlib.Path) -> tuple[list[SafetensorsFile], dict[str, FileTensor]]:
    """Opens a file, or the files of a directory (those in its index if it has one), and lists their tensors by name."""
    index: dict[str, str] = {}
    paths: Iterable[pathlib.Path] = [path]
    with _refuse_unopened(path):
        is_directory = path.is_dir()
    if is_directory:
        index = read_index(path, "safetensors")
        paths = [path / name for name in sorted(set(index.values()))] if index else sorted(path.glob("*.safetensors"))
        if absent := [str(file) for file in paths if index and not file.exists()]:
            raise LoadError(f"the index of {path} names missing files: {join_some(absent)}")
        if not paths:
            others = sorted(file.name for file in path.iterdir() if file.suffix in _TORCH_SUFFIXES)
            advice = f", but {join_some(others)}: {_TORCH_LOAD}" if others else ""
            raise LoadError(f"{path} contains no safetensors file{advice}")
    with contextlib.ExitStack() as on_error:
        files = []
        for each in paths:
            files.append(SafetensorsFile(each))
            on_error.callback(files[-1].close)
        tensors = dict(_list_tensors(path, files, index))
        on_error.pop_all()
        return files, tensors


def read_index(directory: pathlib.Path, suffix: str) -> dict[str, str]:
    """Reads the index that transformers writes: the name of each tensor's file; empty if there is no index or several.

    suffix: the suffix of the files, such as ``safetensors``.

    Raises LoadError if the index is malformed, names files outside of the directory, or cannot be opened.
    """
    indexes = sorted(directory.glob(f"*.{suffix}.index.json"))
    if len(indexes) != 1:
        return {}
    with _raise_load_errors(indexes[0]), _refuse_unopened(indexes[0]):
        return read_weight_map(indexes[0])


def _list_tensors(
    path: pathlib.Path, files: list[SafetensorsFile], index: dict[str, str]
) -> Iterator[tuple[str, FileTensor]]:
    file_of: dict[str, pathlib.Path] = {}
    for file in files:
        names = {name for name, where in index.items() if where == file.path.name} if index else set(file.tensors)
        if lacking := sorted(names - set(file.tensors)):
            raise LoadError(f"{file.path} lacks tensors that the index of {path} names: {join_some(lacking)}")
        for name, tensor in file.tensors.items():
            if name in names:
                if name in file_of:
                    raise LoadError(f"{name} is in {file_of[name]} and in {file.path}")
                file_of[name] = file.path
                yield name, tensor


def _get_torch_dtype(name: str, dtype: str) -> torch.dtype:
    """Returns the torch dtype called ``dtype``. Raises BadFile, with the tensor's ``name``, if this torch does not have
    it.
    """
    if not isinstance(found := getattr(torch, dtype, None), torch.dtype):
        raise BadFile(f"has the dtype {dtype}, which torch {torch.__version__} does not have", name)
    return found


def _refuse_torch_file(file: OpenFile) -> None:
    """Raises BadFile if the file begins like the files of torch.save."""
    begin = file.read(0, min(file.size, len(_ZIP)))
    if begin == _ZIP:
        raise BadFile(f"is a zip file, as of torch.save, not a safetensors file: {_TORCH_LOAD}")
    if len(begin) > 1 and begin[0] == 0x80 and begin[1] in _PICKLE_PROTOCOLS:
        raise BadFile(f"is a pickle, as of torch.save before torch 1.6, not a safetensors file: {_TORCH_LOAD}")


@contextlib.contextmanager
def _refuse_unopened(path: pathlib.Path) -> Iterator[None]:
    """Context that raises LoadError if a file that the block opens is absent or cannot be opened."""
    try:
        yield
    except FileNotFoundError as error:
        raise LoadError(f"there is no file or directory {path}") from error
    except OSError as error:
        raise LoadError(f"{path} cannot be opened: {error.strerror}") from error


@contextlib.contextmanager
def _raise_load_errors(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except BadFile as error:
        raise LoadError(error.describe(path)) from None
