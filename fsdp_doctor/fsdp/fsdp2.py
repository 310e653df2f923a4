"""FSDP2: sharding as verl does it, its manual offload and staging, and the shards at rest."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdp_doctor.case import models
from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.names import unwrapped


def shard(
    model: nn.Module, mesh: DeviceMesh, *, compute_dtype: torch.dtype, policy: bool, pin_memory: bool
) -> nn.Module:
    """Shards in place: each decoder layer, an untied embedding, the root. Every rank must call it."""
    mp_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=True)
    offload_policy = CPUOffloadPolicy(pin_memory=pin_memory) if policy else OffloadPolicy()
    units = models.decoder_layers(model)
    embedding = models.input_embedding(model)
    for unit in (*units, *([embedding] if embedding is not None else []), model):
        fully_shard(unit, mesh=mesh, mp_policy=mp_policy, offload_policy=offload_policy)
    return model


@torch.no_grad()
def offload(model: nn.Module, *, non_blocking: bool) -> None:
    """verl's offload_fsdp2_model_to_cpu."""
    model.to("cpu", non_blocking=non_blocking)


@torch.no_grad()
def load(model: nn.Module, device: torch.device, *, non_blocking: bool) -> None:
    """verl's load_fsdp2_model_to_gpu, whatever offload the model is under."""
    model.to(device, non_blocking=non_blocking)


@torch.no_grad()
def unstage(model: nn.Module, device: torch.device) -> None:
    """Undoes ``load`` under CPUOffloadPolicy: shards to the CPU, where torch expects them, buffers to ``device``.

    A half-moved module trains again after it. The policy moves parameters only, so the buffers
    that ``model.to`` took along must come back.
    """
    model.to("cpu")
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


@torch.no_grad()
def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, as it lies: no copy, no collective, half-moved ones too.

    Without autograd ``DTensor.to_local`` returns the local tensor itself (torch/distributed/
    tensor/_api.py); a plain tensor is its own local part.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def entries(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(unwrapped name, parameter or persistent buffer), tied parameters under each name."""
    parameters, buffers = private.parameters_and_buffers(model)
    for name, tensor in (*parameters, *buffers):
        yield unwrapped(name), tensor
