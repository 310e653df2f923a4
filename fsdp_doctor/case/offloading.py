"""Offloads a model and its optimizer by hand and loads them again, with verl's functions or in the ways of other
frameworks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.private import fsdp2


@torch.no_grad()
def offload(model: nn.Module, *, non_blocking: bool) -> None:
    """Moves the model to the CPU like verl's offload_fsdp_model_to_cpu and offload_fsdp2_model_to_cpu."""
    _move(model, torch.device("cpu"), non_blocking=non_blocking)


@torch.no_grad()
def load(model: nn.Module, device: torch.device, *, non_blocking: bool) -> None:
    """Moves the model to ``device`` like verl's load_fsdp_model_to_gpu and load_fsdp2_model_to_gpu.

    FSDP1 units under CPUOffload are not moved; an FSDP2 model is moved even under CPUOffloadPolicy.
    """
    _move(model, device, non_blocking=non_blocking)


def _move(model: nn.Module, device: torch.device, *, non_blocking: bool) -> None:
    if not isinstance(model, FullyShardedDataParallel):
        model.to(device, non_blocking=non_blocking)
        return
    private.run_fsdp1_lazy_init(model)
    for unit in reader.read(model).fsdp1_units:
        unit.move_to(device, non_blocking=non_blocking)


@torch.no_grad()
def move_shards(model: nn.Module, device: torch.device, *, pin_memory: bool) -> None:
    """Moves every shard to new memory on ``device``, like miles_diffusion's sleep and wake (pull request 182)."""
    fsdp2.give_memory(model, device, pin_memory=pin_memory)


@torch.no_grad()
def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device, *, non_blocking: bool = False) -> None:
    """Moves every tensor of the optimizer's state, including step counters, like verl's offload_fsdp_optimizer and
    load_fsdp_optimizer.
    """
    for state in optimizer.state.values():
        entries: dict[str, Any] = state
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                entries[key] = value.to(device, non_blocking=non_blocking)


def keep_state_on_host(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Registers hooks that move the optimizer's state to ``device`` for each step and back to the CPU, like verl's
    optimizer_offload_step (pull request 7804).
    """
    optimizer.register_step_pre_hook(lambda updated, *_: move_optimizer(updated, device))
    optimizer.register_step_post_hook(lambda updated, *_: move_optimizer(updated, torch.device("cpu")))


@torch.no_grad()
def unstage(model: nn.Module, device: torch.device, offloaded: Collection[nn.Module]) -> None:
    """Undoes ``load`` under CPUOffloadPolicy: moves shards to the CPU, where torch expects them, and buffers to
    ``device``.

    Even a module that was moved only in part can train again afterwards. The policy moves only parameters, so buffers
    that ``model.to`` moved must be moved back.

    offloaded: the modules under the policy. The other units are moved to ``device``, outer units first.
    """
    model.to("cpu")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.to("cpu" if module in offloaded else device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
