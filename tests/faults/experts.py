"""Mistakes of frameworks with experts that differ between groups of ranks under one name, each next to the right way.

Every function names the thread that it is of. ``experts`` is the mesh along which they are divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

import fsdp_doctor

_Tensors = Iterator[tuple[str, torch.Tensor]]


def _list_parameters(model: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """(name, parameter, whether it is of experts)."""
    for name, parameter in model.named_parameters():
        yield name, parameter, ".experts." in name


def _gather_groups(full: torch.Tensor, experts: DeviceMesh) -> list[torch.Tensor]:
    groups = [torch.empty_like(full) for _ in range(experts.size())]
    dist.all_gather(groups, full.contiguous(), group=experts.get_group())
    return groups


def gathers_every_group(model: nn.Module, experts: DeviceMesh) -> _Tensors:
    for name, parameter, is_expert in _list_parameters(model):
        full = parameter.full_tensor().detach()
        yield name, torch.cat(_gather_groups(full, experts)) if is_expert else full


def gathers_its_mesh_alone(model: nn.Module) -> _Tensors:
    """modelscope/twinkle#116, and the file of rank 0 in UniRL#158."""
    for name, parameter, _ in _list_parameters(model):
        yield name, parameter.full_tensor().detach()


def begins_at_another_group(model: nn.Module, experts: DeviceMesh) -> _Tensors:
    """verl#7195, vLLM#51130: the first expert's number is that of another group."""
    for name, parameter, is_expert in _list_parameters(model):
        full = parameter.full_tensor().detach()
        yield name, torch.cat(_gather_groups(full, experts)[::-1]) if is_expert else full


def keeps_one_buffer(model: nn.Module, experts: DeviceMesh) -> _Tensors:
    """verl's engine for VeOmni: the next tensor of experts arrives where the one before lies."""
    buffer: torch.Tensor | None = None
    for name, parameter, is_expert in _list_parameters(model):
        full = parameter.full_tensor().detach()
        if is_expert:
            gathered = torch.cat(_gather_groups(full, experts))
            buffer = gathered.flatten() if buffer is None else buffer
            full = buffer[: gathered.numel()].view(gathered.shape).copy_(gathered)
        yield name, full


def _write(parameter: Any, full: torch.Tensor) -> None:
    """Takes the rank's part of what its own mesh shards."""
    mesh = parameter.device_mesh
    parameter.to_local().copy_(full.chunk(mesh.size())[mesh.get_local_rank()])


def _load(model: nn.Module, state: Mapping[str, torch.Tensor], experts: DeviceMesh, group: int) -> None:
    with torch.no_grad():
        for name, parameter, is_expert in _list_parameters(model):
            _write(parameter, state[name].chunk(experts.size())[group] if is_expert else state[name])


@fsdp_doctor.promises(direction="in")
def loads_each_group(model: nn.Module, state: Any, experts: DeviceMesh) -> None:
    _load(model, state, experts, experts.get_local_rank())


@fsdp_doctor.promises(direction="in")
def counts_from_zero(model: nn.Module, state: Any, experts: DeviceMesh) -> None:
    """KempnerForge#202, NVIDIA/Model-Optimizer#2207: every group numbers its experts from 0."""
    _load(model, state, experts, 0)


@fsdp_doctor.promises(direction="in")
def broadcasts_rank_0s(model: nn.Module, state: Any, experts: DeviceMesh, device: torch.device) -> None:
    """huggingface/transformers#45662: what ranks have of their own is taken for one parameter of all."""
    loads_each_group(model, state, experts)
    with torch.no_grad():
        for _, parameter, is_expert in _list_parameters(model):
            if is_expert:
                full = parameter.full_tensor().contiguous().to(device)
                dist.broadcast(full, 0)
                _write(parameter, full)


@fsdp_doctor.promises(direction="in")
def writes_into_a_cast(model: nn.Module, state: Any, experts: DeviceMesh) -> None:
    """NVIDIA-NeMo/Automodel#2682: the cast of a view is no view any more; its name counts as loaded."""
    with torch.no_grad():
        for name, parameter, is_expert in _list_parameters(model):
            if is_expert:
                parameter.to_local().bfloat16().zero_()
            else:
                _write(parameter, state[name])


@fsdp_doctor.promises(direction="in")
def leaves_the_shards(model: nn.Module, state: Any, experts: DeviceMesh) -> None:
    """ISEEKYAN/Megatron-LM#104: the full parameters are loaded, and the shards are what they were."""
    with torch.no_grad():
        for name, parameter, is_expert in _list_parameters(model):
            if not is_expert:
                _write(parameter, state[name])
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and name.endswith(".experts"):
                module.unshard()
                for key, parameter in module.named_parameters():
                    parameter.copy_(state[f"{name}.{key}"].chunk(experts.size())[experts.get_local_rank()])
                module.reshard()
