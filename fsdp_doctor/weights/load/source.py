"""Source of a load, in any form that a caller may give: a mapping, an iterable or safetensors files."""

from __future__ import annotations

import collections
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from fsdp_doctor.checkpoints.files import make_path
from fsdp_doctor.weights.fsdp.forms import describe_unless_dense
from fsdp_doctor.weights.load.outcome import LoadError
from fsdp_doctor.weights.load.safetensors_files import FileTensor, SafetensorsFile, open_files

SourceKind = Literal["mapping", "iterator", "files"]

TensorSource: TypeAlias = (
    Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | str | os.PathLike[str] | None
)
Value: TypeAlias = torch.Tensor | FileTensor

# A sample has the size of one disk read; over a network each read may take a millisecond, so the number of samples is
# limited. Between two training steps hardly any tensor keeps the same 4 KiB.
_SAMPLE_BYTES = 4096
_MOST_SAMPLES = 128


@dataclass(kw_only=True)
class LoadSource:
    """Source of the load on one rank.

    kind: the kind of source; None if this rank has no source.
    tensors: the tensors by name; empty for an iterator, whose tensors are in ``items``.
    ignored: names of items to skip.
    """

    kind: SourceKind | None
    tensors: Mapping[str, Value] = field(default_factory=dict)
    items: Iterator[Any] | None = None
    files: list[SafetensorsFile] = field(default_factory=list)
    ignored: Collection[str] = ()

    @property
    def file_tensors(self) -> dict[str, FileTensor]:
        return {name: value for name, value in self.tensors.items() if isinstance(value, FileTensor)}

    @property
    def makes_values(self) -> bool:
        """True if a mapping may make a tensor anew at each access, so that all tensors together may be too large to
        keep.
        """
        return self.kind == "mapping" and type(self.tensors) not in (dict, collections.OrderedDict)

    def read_items(self) -> Iterator[tuple[str, Value]]:
        """Checks and yields the items of an iterator."""
        for item in self.items or ():
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise TypeError(f"the source must yield pairs of a name and a tensor, not {type(item).__name__}")
            if item[0] not in self.ignored:
                check_value(*item)
                yield item[0], item[1]

    def digest_files(self) -> tuple[str, str]:
        """Returns digests of the tensors in files: one of all names, shapes and dtypes, and one of bytes in the middle
        of some tensors.

        The second digest detects an older checkpoint with the same names and shapes, which a node with a separate disk
        may have.
        """
        tensors = dict(sorted(self.file_tensors.items()))
        described, sampled = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
        for name, tensor in tensors.items():
            described.update(f"{name}: {tensor.dtype} {list(tensor.shape)}\n".encode())
        stride = -(-len(tensors) // _MOST_SAMPLES) or 1
        for tensor in list(tensors.values())[::stride]:
            nbytes = tensor.end - tensor.begin
            sample = bytearray(min(nbytes, _SAMPLE_BYTES))
            tensor.file.read(tensor.begin + (nbytes - len(sample)) // 2, memoryview(sample))
            sampled.update(sample)
        return described.hexdigest(), sampled.hexdigest()

    def check_unchanged(self) -> None:
        """Raises LoadError for a file that was written to or replaced since it was opened."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        for file in self.files:
            file.close()


def open_source(source: TensorSource, *, is_first: bool, ignored: Collection[str] = ()) -> LoadSource:
    """Opens the source that a caller gave.

    is_first: whether this is rank 0 of the load, on which an empty mapping counts as a source; on other ranks it counts
        as no source.
    ignored: names of items to skip, whatever they are.
    """
    if source is None or (isinstance(source, Mapping) and not source and not is_first):
        return LoadSource(kind=None)
    if isinstance(source, Mapping):
        if any(name in source for name in ignored):
            source = {name: value for name, value in source.items() if name not in ignored}
        for name, value in source.items():
            check_value(name, value)
        return LoadSource(kind="mapping", tensors=source)
    if isinstance(source, str | os.PathLike):
        files, in_files = open_files(make_path(source))
        tensors = {name: tensor for name, tensor in in_files.items() if name not in ignored}
        return LoadSource(kind="files", tensors=tensors, files=files)
    if isinstance(source, Iterable) and not isinstance(source, torch.Tensor):
        return LoadSource(kind="iterator", items=iter(source), ignored=ignored)
    raise TypeError(
        "the source must be a mapping, an iterable of (name, tensor), a safetensors file, or a directory of them, "
        f"not {type(source).__name__}"
    )


def check_value(name: Any, value: Any) -> None:
    """Raises TypeError or LoadError unless ``name`` is a string and ``value`` a full, dense tensor."""
    if not isinstance(name, str):
        raise TypeError(f"a name must be a string, not {type(name).__name__}")
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
    if isinstance(value, DTensor):
        raise LoadError(f"{name} is a DTensor, not a full tensor: the source must not be a sharded state dict")
    if form := describe_unless_dense(value):
        raise LoadError(f"{name} is {form} in the source: only dense tensors in memory can be loaded")
