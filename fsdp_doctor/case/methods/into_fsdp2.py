"""Loading methods under test on FSDP2, each written as frameworks write it; matrix/methods.toml has their names.

``state`` is the checkpoint in the form that the method's contract names. Several methods are torch's own functions for
both FSDPs. This module imports nothing of this package, since ``fsdp-doctor repro`` copies its functions into scripts
unchanged.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import distribute_tensor


def load_state_dict(model: torch.nn.Module, state: dict[str, Any]) -> Any:
    return model.load_state_dict(state)


def load_state_dict_assign(model: torch.nn.Module, state: dict[str, Any]) -> Any:
    return model.load_state_dict(state, assign=True)


def set_model_state_dict_full(model: torch.nn.Module, state: dict[str, Any]) -> Any:
    return set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def set_model_state_dict_broadcast(model: torch.nn.Module, state: dict[str, Any]) -> Any:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    return set_model_state_dict(model, state, options=options)


def set_model_state_dict_broadcast_again(model: torch.nn.Module, state: dict[str, Any]) -> Any:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return set_model_state_dict(model, state, options=options)


def set_model_state_dict_broadcast_cpu(model: torch.nn.Module, state: dict[str, Any]) -> Any:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    return set_model_state_dict(model, state, options=options)


def set_model_state_dict_broadcast_lenient(model: torch.nn.Module, state: dict[str, Any]) -> Any:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    return set_model_state_dict(model, state, options=options)


def set_model_state_dict_sharded(model: torch.nn.Module, state: dict[str, Any]) -> Any:
    return set_model_state_dict(model, state)


def load_dcp(model: torch.nn.Module, state: pathlib.Path) -> Any:
    template = {"model": model.state_dict()}
    dcp.load(template, checkpoint_id=state)
    return model.load_state_dict(template["model"])


def distribute_tensor_assign(model: torch.nn.Module, state: dict[str, Any], device: torch.device) -> Any:
    """Loads like accelerate: treats every entry as a DTensor, and puts its shard on the device of the model's shard."""
    sharded = {}
    for name, own in model.state_dict().items():
        if dist.get_rank() == 0:
            full = state[name].to(device)
        else:
            full = torch.empty(own.size(), dtype=own.dtype, device=device)
        dist.broadcast(full, src=0)
        shard = distribute_tensor(full, own.device_mesh, own.placements)
        sharded[name] = shard.cpu() if own.device.type == "cpu" else shard
    return model.load_state_dict(sharded, assign=True)


def empty_and_broadcast(
    model: torch.nn.Module, state: dict[str, Any], device: torch.device, buffers: Mapping[str, torch.Tensor]
) -> Any:
    """Loads like verl: rank 0 keeps its tensors, the other ranks allocate new ones; buffers come from rank 0."""
    first = next(model.parameters())
    offloaded = first.device.type == "cpu"
    if dist.get_rank() == 0 and not first.is_meta:
        model.to(device)
    else:
        model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offloaded)
    result = set_model_state_dict(model, state, options=options)
    for name, buffer in sorted(model.named_buffers()):
        if dist.get_rank() == 0 and name in buffers:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, src=0)
    if offloaded:
        model.to("cpu", non_blocking=True)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
    return result


def load_rank_files(model: torch.nn.Module, state: pathlib.Path) -> Any:
    file = state / f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    return model.load_state_dict(torch.load(file, map_location="cpu", weights_only=False))


def load_rank_files_on_saved_device(model: torch.nn.Module, state: pathlib.Path) -> Any:
    file = state / f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    return model.load_state_dict(torch.load(file, weights_only=False))


def load_rank_files_with_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: pathlib.Path
) -> Any:
    suffix = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    result = model.load_state_dict(torch.load(state / f"model_{suffix}", map_location="cpu", weights_only=False))
    optimizer.load_state_dict(torch.load(state / f"optim_{suffix}", map_location="cpu", weights_only=False))
    return result


def set_optimizer_state_dict_full(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


def set_optimizer_state_dict_broadcast(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def set_optimizer_state_dict_sharded(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    set_optimizer_state_dict(model, optimizer, state)


def load_dcp_with_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: pathlib.Path) -> Any:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=state)
    return set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


def load_dcp_with_fresh_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: pathlib.Path) -> Any:
    template = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(template, checkpoint_id=state)
    optimizer.load_state_dict(template["optimizer"])
    return model.load_state_dict(template["model"])
