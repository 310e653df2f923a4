"""What a path under test is given."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The sharded model in the state that the scenario left it in.

    device: this rank's compute device. scratch: a directory of this path's own, the same on every
    rank, not yet made. control: a gloo group apart from the model's.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    scratch: pathlib.Path
    control: dist.ProcessGroup


def flatten_optimizer_state(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(``<parameter>.<state>``, value) out of torch's ``{"state": {name: {key: value}}}``."""
    for name, values in state["state"].items():
        for key, value in values.items():
            yield f"{name}.{key}", value


def to_device_then_gather(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """verl's step for each entry of a state dict; what is no DTensor is passed on as it lies."""
    if not isinstance(tensor, DTensor):
        return tensor
    moved: Any = tensor.to(device, non_blocking=True)
    full: torch.Tensor = moved.full_tensor()
    return full
