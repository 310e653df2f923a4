"""Reads the weights that a framework left in files, in each of the formats that adapters name."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typing_extensions import assert_never

from fsdp_doctor.frameworks.adapter import SavedFiles

_PATTERNS = ("*.bin", "*.pt", "*.pth")


def weights_in(saved: SavedFiles) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, on the CPU, under its name in the plain model. Each rank reads alone."""
    for name, value in _entries(saved):
        renamed = saved.renamed(name)
        if renamed is not None and isinstance(value, torch.Tensor):
            yield renamed, value


def _entries(saved: SavedFiles) -> Iterator[tuple[str, Any]]:
    match saved.format:
        case "safetensors":
            from safetensors.torch import load_file

            for file in sorted(saved.directory.glob("*.safetensors")):
                yield from load_file(file).items()
        case "torch.save":
            for pattern in _PATTERNS:
                for file in sorted(saved.directory.glob(pattern)):
                    yield from _part(torch.load(file, weights_only=False), saved).items()
        case "dcp":
            yield from _part(_whole_checkpoint(saved.directory), saved).items()
        case _:
            assert_never(saved.format)


def _part(nested: Any, saved: SavedFiles) -> dict[str, Any]:
    for key in saved.part:
        nested = nested[key]
    found: dict[str, Any] = nested
    return found


def _whole_checkpoint(directory: pathlib.Path) -> dict[str, Any]:
    """A distributed checkpoint as one nested dictionary, read by this process alone."""
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        whole = pathlib.Path(temporary) / "whole.pt"
        dcp_to_torch_save(directory, whole)
        found: dict[str, Any] = torch.load(whole, weights_only=False)
        return found
