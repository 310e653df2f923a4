"""Extractions that are right where each entry is read when it comes, and not with another consumer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Entries = Iterator[tuple[str, torch.Tensor]]


def honest(model: nn.Module) -> Entries:
    """Every rank makes all gathers before it yields, so that none waits for another."""
    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    yield from whole.items()


def reuses_a_buffer(model: nn.Module) -> Entries:
    """The next entry of the same shape overwrites the last."""
    buffers: dict[Any, torch.Tensor] = {}
    for name, tensor in honest(model):
        buffer = buffers.setdefault((tensor.shape, tensor.dtype), torch.empty_like(tensor))
        yield name, buffer.copy_(tensor)


def yields_what_another_stream_writes(model: nn.Module, device: torch.device) -> Entries:
    """The stream of the call waits for it, and not that under which it is taken."""
    module = torch.get_device_module(device)
    home, own = module.current_stream(device), module.Stream(device)
    for name, tensor in honest(model):
        own.wait_stream(module.current_stream(device))
        with module.stream(own):
            written = tensor.clone()
        home.wait_stream(own)
        yield name, written


def leaves_the_others_waiting(model: nn.Module) -> Entries:
    for name, tensor in model.state_dict().items():
        yield name, tensor.full_tensor()
