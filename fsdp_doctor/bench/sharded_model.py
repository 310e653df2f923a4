"""A model of a real shape, sharded and filled with numbers on each rank."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_doctor.bench.request import BenchOptions
from fsdp_doctor.case import offloading
from fsdp_doctor.case.runtime import start as start_runtime
from fsdp_doctor.case.sharding import shard_fsdp1, shard_fsdp2
from fsdp_doctor.extract.sources import device_of
from fsdp_doctor.fsdp import private, reader
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.memory.rollout import RolloutRequest, TrainerState
from fsdp_doctor.plan.meta_model import on_meta

DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build(options: BenchOptions, strategy: str, offload: str, dtype: torch.dtype, mesh: DeviceMesh) -> nn.Module:
    """The sharded model in the state that ``offload`` leaves it in. Every rank must call it."""
    return sharded(on_meta(options.model, options.layers, dtype=dtype), strategy, offload, mesh)


def load_trainer(
    request: RolloutRequest, state: TrainerState, rank: int, scratch: pathlib.Path
) -> tuple[torch.device, nn.Module]:
    """Joins a trainer's process group, and loads the model there if ``state`` says so. Every rank must call it."""
    runtime = start_runtime(
        dist.FileStore(str(scratch / "store"), request.ranks),
        place=Place(rank=rank, world_size=request.ranks, local_rank=rank, num_nodes=1),
        run_device=RunDevice(type=request.device, memory=request.memory),
        backend="mixed",
        scratch=scratch,
        custom_model=None,
    )
    model = nn.Module()
    if state == "loaded":
        whole = on_meta(request.model, request.layers, dtype=DTYPE[request.dtype])
        model = sharded(whole, request.strategy, "none", runtime.mesh(request.sharding))
    runtime.synchronize()
    return runtime.device, model


def sharded(whole: nn.Module, strategy: str, offload: str, mesh: DeviceMesh) -> nn.Module:
    """A model that was on the meta device, as :func:`build` gives it. Every rank must call it."""
    device = device_of(mesh.device_type)
    if strategy == "fsdp2":
        model = _sharded_2(whole, offload, mesh, device)
    else:
        model = _sharded_1(whole, offload, mesh, device, use_orig_params=strategy == "fsdp1-orig")
    if offload == "param":
        offloading.offload(model, non_blocking=False)
    return model


def _sharded_2(whole: Any, offload: str, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    policy = offload.startswith("policy")
    model = shard_fsdp2(
        whole,
        mesh,
        compute_dtype=torch.bfloat16,
        policy=policy,
        pin_memory=offload == "policy" and device.type != "cpu",
    )
    model.to_empty(device="cpu" if policy else device)
    whole.tie_weights()
    for tensor in reader.read(model).tensors():
        fill(private.local_tensor(tensor.tensor), device)
    return model


def _sharded_1(whole: Any, offload: str, mesh: DeviceMesh, device: torch.device, *, use_orig_params: bool) -> nn.Module:
    # Whole for a moment, because FSDP1 made from the meta device forgets which weights are tied.
    whole.to_empty(device=device)
    whole.tie_weights()
    model = shard_fsdp1(
        whole,
        mesh,
        device,
        compute_dtype=torch.bfloat16,
        policy=offload.startswith("policy"),
        use_orig_params=use_orig_params,
    )
    private.fsdp1_lazy_init(model)
    for unit in reader.read(model).fsdp1_units:
        fill(unit.shard, device)
    return model


def shard_bytes(model: nn.Module) -> float:
    held = reader.read(model)
    units = [unit.shard.nbytes for unit in held.fsdp1_units]
    return sum(units) or sum(private.local_tensor(tensor.tensor).nbytes for tensor in held.tensors())


@torch.no_grad()
def fill(tensor: torch.Tensor, device: torch.device) -> None:
    """Numbers that differ, of a weight's size, made on the device: zeros copy faster than weights."""
    flat = tensor.view(-1)
    for part in flat.split(64 << 20):
        part.copy_(torch.randn(part.numel(), dtype=part.dtype, device=device) * 0.02)
