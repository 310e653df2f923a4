"""What the caller gives to load from, whichever kind it is."""

from __future__ import annotations

import collections
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from fsdp_doctor.load.outcome import LoadError
from fsdp_doctor.load.safetensors_files import FileTensor, SafetensorsFile, open_files

Kind = Literal["mapping", "iterator", "files"]

TensorSource: TypeAlias = (
    Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | str | os.PathLike[str] | None
)
Value: TypeAlias = torch.Tensor | FileTensor


@dataclass(kw_only=True)
class GivenSource:
    """What one rank has. kind: None for nothing. tensors: by name, for an iterator none; items: of an iterator."""

    kind: Kind | None
    tensors: Mapping[str, Value] = field(default_factory=dict)
    items: Iterator[Any] | None = None
    _files: list[SafetensorsFile] = field(default_factory=list)

    @property
    def in_files(self) -> dict[str, FileTensor]:
        """What lies in files, by name."""
        return {name: value for name, value in self.tensors.items() if isinstance(value, FileTensor)}

    @property
    def directories(self) -> list[str]:
        """Of the files."""
        return sorted({str(file.path.parent) for file in self._files})

    @property
    def makes_values(self) -> bool:
        """Whether a mapping may make its tensors when it is asked for them, so that they are not all to be kept."""
        return self.kind == "mapping" and type(self.tensors) not in (dict, collections.OrderedDict)

    def values(self) -> Iterator[tuple[str, Value]]:
        """Of an iterator, checked as they come."""
        for item in self.items or ():
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise TypeError(f"the source must yield pairs of a name and a tensor, not {type(item).__name__}")
            name, value = item
            check_value(name, value)
            yield name, value

    def check_unchanged(self) -> None:
        """After the last value was read. Raises LoadError for a file that is another than when it was opened."""
        for file in self._files:
            file.check_unchanged()

    def close(self) -> None:
        for file in self._files:
            file.close()


def given(source: TensorSource, *, is_first: bool) -> GivenSource:
    """An empty mapping is nothing, except on rank 0."""
    if source is None or (isinstance(source, Mapping) and not source and not is_first):
        return GivenSource(kind=None)
    if isinstance(source, Mapping):
        for name, value in source.items():
            check_value(name, value)
        return GivenSource(kind="mapping", tensors=source)
    if isinstance(source, str | os.PathLike):
        files, tensors = open_files(pathlib.Path(source))
        return GivenSource(kind="files", tensors=tensors, _files=files)
    if isinstance(source, Iterable) and not isinstance(source, torch.Tensor):
        return GivenSource(kind="iterator", items=iter(source))
    raise TypeError(
        "the source must be a mapping, an iterable of (name, tensor), a safetensors file, or a directory of them, "
        f"not {type(source).__name__}"
    )


def check_value(name: Any, value: Any) -> None:
    """Raises TypeError, LoadError for what is no full tensor."""
    if not isinstance(name, str):
        raise TypeError(f"a name must be a string, not {type(name).__name__}")
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
    if isinstance(value, DTensor):
        raise LoadError(f"{name} is a DTensor, not a full tensor: the source must not be a sharded state dict")
    # Of a wrapper, such as a fake tensor or what a collective is yet to fill, the values are somewhere else.
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise LoadError(f"{name} is a {type(value).__name__} in the source: only ordinary tensors can be loaded")
    if value.layout != torch.strided or value.is_quantized:
        raise LoadError(f"{name} is {_kind(value)} in the source: only dense tensors can be loaded")
    if value.is_meta:
        raise LoadError(f"{name} is on the meta device in the source")


def _kind(value: torch.Tensor) -> str:
    return "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
