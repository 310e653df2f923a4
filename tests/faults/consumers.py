"""Extractions that are right where each entry is read when it comes, and not with another consumer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdp_doctor import full_tensors, promises

Entries = Iterator[tuple[str, torch.Tensor]]


def honest(model: nn.Module) -> Entries:
    """Every rank makes all gathers before it yields, so that none waits for another; on one stream."""
    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    yield from whole.items()


@promises(keeps=False)
def reuses_a_buffer_and_says_so(model: nn.Module) -> Entries:
    return reuses_a_buffer(model)


@promises(streams="one")
def gathers_at_the_call(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(honest(model))


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


def gathers_in_step(model: nn.Module) -> Entries:
    return full_tensors(model, bucket_bytes=1 << 16, in_step=True)


def gathers_ahead(model: nn.Module) -> Entries:
    return full_tensors(model, bucket_bytes=1 << 14)


def yields_a_tensor_twice(model: nn.Module) -> Entries:
    for name, tensor in leaves_the_others_waiting(model):
        yield name, tensor
        if name.endswith("k_proj.weight"):
            yield name, tensor


_KEPT: list[Any] = []
_BUFFERS: dict[str, torch.Tensor] = {}


def returns_the_buffers_of_the_last_call(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: _BUFFERS.setdefault(name, torch.empty_like(tensor)).copy_(tensor) for name, tensor in honest(model)}


def keeps_host_memory(model: nn.Module) -> Entries:
    _KEPT.append(torch.empty(6 << 10))
    return leaves_the_others_waiting(model)


def keeps_a_descriptor(model: nn.Module) -> Entries:
    _KEPT.append(open(os.devnull))
    return leaves_the_others_waiting(model)


def makes_a_stream(model: nn.Module, device: torch.device) -> Entries:
    torch.get_device_module(device).Stream(device)
    return leaves_the_others_waiting(model)
