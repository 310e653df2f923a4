"""FSDP1's flat shards at rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.names import unwrapped


def units(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(prefix of the unit's unwrapped names, handle), in module order."""
    for name, handle in private.fsdp1_units(model):
        prefix = unwrapped(f"{name}." if name else "")
        yield prefix, handle


def unit_names(prefix: str, handle: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """The unit's unwrapped parameter names, and (tied name, the name that it is tied to)."""
    names, tied = private.flat_names(handle)
    return (
        [unwrapped(prefix + name) for name in names],
        [(unwrapped(prefix + name), unwrapped(prefix + primary)) for name, primary in tied],
    )


def buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(unwrapped name, persistent buffer)."""
    for name, buffer in private.parameters_and_buffers(model)[1]:
        yield unwrapped(name), buffer
