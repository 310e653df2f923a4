"""A framework's manual offload, and the load that brings the model back: verl's functions for both FSDPs."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_doctor.weights.fsdp import private, reader


@torch.no_grad()
def offload(model: nn.Module, *, non_blocking: bool) -> None:
    """verl's offload_fsdp_model_to_cpu and offload_fsdp2_model_to_cpu."""
    _move(model, torch.device("cpu"), non_blocking=non_blocking)


@torch.no_grad()
def load(model: nn.Module, device: torch.device, *, non_blocking: bool) -> None:
    """verl's load_fsdp_model_to_gpu and load_fsdp2_model_to_gpu.

    FSDP1's units under a policy stay where they are; an FSDP2 model is moved whatever offload it is under.
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
def unstage(model: nn.Module, device: torch.device) -> None:
    """Undoes ``load`` under CPUOffloadPolicy: shards to the CPU, where torch expects them, buffers to ``device``.

    A half-moved module trains again after it. The policy moves parameters only, so the buffers
    that ``model.to`` took along must come back.
    """
    model.to("cpu")
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
