"""The extraction paths under test on FSDP2, each as frameworks write it. The names are in paths.py."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_doctor.case.paths.inputs import Subject, flatten_optimizer_state, to_device_then_gather


def state_dict(subject: Subject) -> Any:
    return subject.model.state_dict()


def state_dict_to_full_tensor(subject: Subject) -> Iterator[tuple[str, Any]]:
    for name, tensor in subject.model.state_dict().items():
        yield name, to_device_then_gather(tensor, subject.device)


def state_dict_held(subject: Subject) -> Iterator[tuple[str, Any]]:
    """The framework offloads the model while it goes on reading the state dict that it took before."""
    held = subject.model.state_dict()
    subject.model.to("cpu")
    try:
        for name, tensor in held.items():
            yield name, to_device_then_gather(tensor, subject.device)
    finally:
        subject.model.to(subject.device)


def state_dict_full_tensor_to(subject: Subject) -> Iterator[tuple[str, Any]]:
    for name, tensor in subject.model.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, full.to(subject.device)


def parameters_full_tensor(subject: Subject) -> Iterator[tuple[str, Any]]:
    for name, parameter in subject.model.named_parameters():
        yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def parameters_data_full_tensor(subject: Subject) -> Iterator[tuple[str, Any]]:
    for name, parameter in subject.model.named_parameters():
        data = parameter.data
        yield name, data.full_tensor() if isinstance(data, DTensor) else data


def model_state_dict_sharded(subject: Subject) -> Any:
    return get_model_state_dict(subject.model)


def model_state_dict_sharded_cpu(subject: Subject) -> Any:
    return get_model_state_dict(subject.model, options=StateDictOptions(cpu_offload=True))


def model_state_dict_full(subject: Subject) -> Any:
    return get_model_state_dict(subject.model, options=StateDictOptions(full_state_dict=True))


def model_state_dict_full_cpu(subject: Subject) -> Any:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(subject.model, options=options)


def unshard(subject: Subject) -> Iterator[tuple[str, Any]]:
    """Each parameter belongs to the innermost FSDP module around it."""
    modules = {name: m for name, m in subject.model.named_modules() if isinstance(m, FSDPModule)}
    for prefix in sorted(modules, key=lambda name: name.count("."), reverse=True):
        module = modules[prefix]
        module.unshard()
        assert isinstance(module, torch.nn.Module)
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                yield f"{prefix}.{name}" if prefix else name, parameter
        module.reshard()


def dcp_save_and_load(subject: Subject) -> Any:
    state = subject.model.state_dict()
    dcp.save(state, checkpoint_id=subject.scratch)
    try:
        full = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
        dcp.load(full, checkpoint_id=subject.scratch)
        dist.barrier(group=subject.control)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(subject.scratch, ignore_errors=True)
    return full


def from_local(subject: Subject) -> Iterator[tuple[str, Any]]:
    for name, parameter in subject.model.named_parameters():
        if not isinstance(parameter, DTensor):
            yield name, parameter
            continue
        with torch.no_grad():
            local = parameter.to_local().to(subject.device)
        yield name, DTensor.from_local(local, parameter.device_mesh, parameter.placements).full_tensor()


def summon_full_params(subject: Subject) -> Iterator[tuple[str, Any]]:
    with FullyShardedDataParallel.summon_full_params(subject.model, writeback=False):
        yield from subject.model.named_parameters()


def weights_info(subject: Subject) -> Iterator[tuple[str, Any]]:
    for name, tensor in subject.model.state_dict().items():
        yield name, (tensor.size(), tensor.dtype)


def optimizer_state_dict(subject: Subject) -> Iterator[tuple[str, Any]]:
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(subject.model, subject.optimizer, options=options)
    yield from flatten_optimizer_state(state)
