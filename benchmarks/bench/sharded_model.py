"""Shards a model with the shape of a real model, and fills it with random numbers on each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_doctor.case import offloading
from fsdp_doctor.case.sharding import shard_fsdp1, shard_fsdp2
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.transport.sources import find_device

DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def shard_model(whole: nn.Module, scenario: Scenario, mesh: DeviceMesh) -> nn.Module:
    """Shards a model that is on the meta device, fills it with numbers, and offloads it if the scenario does.

    The model is not staged. Every rank must call this function.
    """
    device = find_device(mesh.device_type)
    if scenario.version == 2:
        model = _shard_by_fsdp2(whole, scenario, mesh, device)
    else:
        model = _shard_by_fsdp1(whole, scenario, mesh, device)
    if scenario.param_offload:
        offloading.offload(model, non_blocking=False)
    return model


def _shard_by_fsdp2(whole: Any, scenario: Scenario, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    model = shard_fsdp2(
        whole,
        mesh,
        compute_dtype=torch.bfloat16,
        offload=scenario.offload,
        pin_memory=scenario.pinning.is_pinned and device.type != "cpu",
    )
    model.to_empty(device="cpu" if scenario.policy else device)
    whole.tie_weights()
    for tensor in reader.read(model).list_tensors():
        fill(private.read_local_tensor(tensor.tensor), device)
    return model


def _shard_by_fsdp1(whole: Any, scenario: Scenario, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    # The whole model is materialized first, because FSDP1 loses track of tied weights on the meta device.
    whole.to_empty(device=device)
    whole.tie_weights()
    model = shard_fsdp1(
        whole,
        mesh,
        device,
        compute_dtype=torch.bfloat16,
        offload=scenario.offload,
        use_orig_params=scenario.strategy.uses_original_parameters,
    )
    private.run_fsdp1_lazy_init(model)
    for unit in reader.read(model).fsdp1_units:
        # Under CPUOffload, lazy initialization pins a copy of the shard, which is used from the first forward on.
        unit.unite_memories()
        fill(unit.shard, device)
    return model


def shard_bytes(model: nn.Module) -> float:
    """Returns the bytes of this rank's shards."""
    parts = reader.read(model)
    units = [unit.shard.nbytes for unit in parts.fsdp1_units]
    return sum(units) or sum(private.read_local_tensor(tensor.tensor).nbytes for tensor in parts.list_tensors())


@torch.no_grad()
def fill(tensor: torch.Tensor, device: torch.device) -> None:
    """Fills a tensor with random numbers that are made on the device.

    Zeros are not used, because they copy faster than weights.
    """
    flat = tensor.view(-1)
    for part in flat.split(64 << 20):
        part.copy_(torch.randn(part.numel(), dtype=part.dtype, device=device) * 0.02)
