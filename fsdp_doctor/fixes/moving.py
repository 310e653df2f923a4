"""Replacement for the offload in verl and SkyRL, and functions that replacements for offloads share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_doctor.fixes.applying import fall_back
from fsdp_doctor.weights.fsdp import reader


def is_offloaded(model: nn.Module) -> bool:
    """Returns whether FSDP2 shards a model, and every unit of it is under CPUOffloadPolicy."""
    units = reader.read(model).fsdp2_units
    return bool(units) and all(unit.offloads for unit in units)


def move_unsharded(model: nn.Module, device: object) -> None:
    """Moves, in place, the tensors that FSDP2 does not shard."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)  # type: ignore[call-overload]


def is_uneven(model: nn.Module) -> bool:
    """Returns whether a sharded dimension of any parameter cannot be divided evenly among its ranks."""
    return any(
        parameter.shape[placement.dim] % parameter.device_mesh.size(number)
        for parameter in model.parameters()
        if isinstance(parameter, DTensor)
        for number, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard)
    )


def offload_uneven_shards(original: Callable[..., Any], model: nn.Module, empty_cache: bool = True) -> Any:
    """Replaces verl's and SkyRL's ``offload_fsdp2_model_to_cpu``; waits until uneven shards are copied.

    The original copies without blocking, so that FSDP2 pads uneven shards before the copies have arrived.
    """
    if not is_uneven(model):
        return fall_back("a model whose shards are even", original, model, empty_cache=empty_cache)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    # It blocks, and leaves the original nothing to copy.
    model.to("cpu")
    return original(model, empty_cache=empty_cache)
