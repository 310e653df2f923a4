"""Reads the weights from the files that a framework's extraction wrote."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typing_extensions import assert_never

from fsdp_doctor.frameworks.adapter import SavedFiles

_PATTERNS = ("*.bin", "*.pt", "*.pth")


def read_weights(saved: SavedFiles) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name in the plain model, tensor on the CPU) for every weight in the files."""
    for name, value in _read_files(saved):
        renamed = saved.renamed(name)
        if renamed is not None and isinstance(value, torch.Tensor):
            yield renamed, value


def _read_files(saved: SavedFiles) -> Iterator[tuple[str, Any]]:
    match saved.format:
        case "safetensors":
            from safetensors.torch import load_file

            for file in sorted(saved.directory.glob("*.safetensors")):
                yield from load_file(file).items()
        case "torch.save":
            for pattern in _PATTERNS:
                for file in sorted(saved.directory.glob(pattern)):
                    yield from _read_part(file, saved)
        case "dcp":
            with tempfile.TemporaryDirectory() as temporary:
                whole = pathlib.Path(temporary) / "whole.pt"
                dcp_to_torch_save(saved.directory, whole)
                yield from _read_part(whole, saved)
        case _:
            assert_never(saved.format)


def _read_part(file: pathlib.Path, saved: SavedFiles) -> Iterator[tuple[str, Any]]:
    nested: Any = torch.load(file, weights_only=False)
    for key in saved.part:
        nested = nested[key]
    yield from nested.items()
