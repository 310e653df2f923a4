"""Extraction methods under test on FSDP2, each written as frameworks write it; matrix/methods.toml has their names.

This module imports nothing of this package, since ``fsdp-doctor repro`` copies its functions into scripts unchanged.
"""

from __future__ import annotations

import pathlib
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def read_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    return model.state_dict()


def move_and_gather_state_dict(model: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, Any]]:
    for name, tensor in model.state_dict().items():
        yield name, tensor.to(device, non_blocking=True).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gather_state_dict_after_offload(model: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, Any]]:
    """Offloads the model while an earlier state dict is kept, as a framework may do, and then reads the state dict."""
    state_dict = model.state_dict()
    model.to("cpu")
    try:
        for name, tensor in state_dict.items():
            yield name, tensor.to(device, non_blocking=True).full_tensor() if hasattr(tensor, "full_tensor") else tensor
    finally:
        model.to(device)


def gather_and_move_state_dict(model: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, Any]]:
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, full.to(device)


def gather_parameters(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def gather_parameters_as_module_source(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the full tensors as vLLM's ModuleSource.iter_full does.

    vLLM sends these tensors over NCCL or CUDA IPC, so they must be on the device.
    """
    for name, parameter in model.named_parameters():
        full_tensor = getattr(parameter, "full_tensor", None)
        yield name, full_tensor() if callable(full_tensor) else parameter


def gather_parameter_data(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        data = parameter.data
        yield name, data.full_tensor() if isinstance(data, DTensor) else data


def get_sharded_model_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model)


def get_sharded_model_state_dict_on_cpu(model: torch.nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))


def get_full_model_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def get_full_model_state_dict_on_cpu(model: torch.nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def unshard(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Unshards module by module: each parameter belongs to the innermost FSDP module around it."""
    modules = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    for prefix in sorted(modules, key=lambda name: name.count("."), reverse=True):
        module = modules[prefix]
        module.unshard()
        assert isinstance(module, torch.nn.Module)
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                yield f"{prefix}.{name}" if prefix else name, parameter
        module.reshard()


def save_and_load_dcp(model: torch.nn.Module, scratch: pathlib.Path, control: dist.ProcessGroup) -> dict[str, Any]:
    state = model.state_dict()
    dcp.save(state, checkpoint_id=scratch)
    try:
        full = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
        dcp.load(full, checkpoint_id=scratch)
        dist.barrier(group=control)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    return full


def save_dcp_in_background(
    model: torch.nn.Module, scratch: pathlib.Path, control: dist.ProcessGroup, train: Callable[[], None]
) -> dict[str, Any]:
    """Saves like torchtitan: the call stages the state, which is written while the job trains on."""
    state = get_model_state_dict(model)
    saving: Any = dcp.async_save(state, checkpoint_id=scratch, process_group=control)
    train()
    saving.result()
    return read_back_dcp(state, scratch, control)


def save_dcp_in_background_pinned(
    model: torch.nn.Module, scratch: pathlib.Path, control: dist.ProcessGroup, train: Callable[[], None]
) -> dict[str, Any]:
    """Saves like torchtitan with async_with_pinned_mem: the copies are made on a separate stream."""
    state = get_model_state_dict(model)
    stager = staging.DefaultStager(staging.StagingOptions())
    saving: Any = dcp.async_save(state, checkpoint_id=scratch, process_group=control, async_stager=stager)
    saving.staging_completion.result()
    train()
    saving.upload_completion.result()
    stager.close()
    return read_back_dcp(state, scratch, control)


def save_dcp_before_the_last_has_ended(
    model: torch.nn.Module, scratch: pathlib.Path, control: dist.ProcessGroup, train: Callable[[], None]
) -> dict[str, Any]:
    """Saves twice with one stager.

    The first save is not waited for, and its store writes nothing before the second save has ended.
    """
    takes = threading.Event()

    class SlowStore(dcp.FileSystemWriter):
        def write_data(self, *plan: Any) -> Any:
            takes.wait()
            return super().write_data(*plan)

    state = get_model_state_dict(model)
    stager: Any = staging.DefaultStager(staging.StagingOptions(False, False, False, False))
    first: Any = dcp.async_save(
        state, storage_writer=SlowStore(scratch / "first"), process_group=control, async_stager=stager
    )
    try:
        train()
        state = get_model_state_dict(model)
        second: Any = dcp.async_save(state, checkpoint_id=scratch / "second", async_stager=stager)
        second.result()
    finally:
        takes.set()
        first.result()
    stager.close()
    return read_back_dcp(state, scratch, control, "first")


def read_back_dcp(
    state: dict[str, Any], scratch: pathlib.Path, control: dist.ProcessGroup, name: str = ""
) -> dict[str, Any]:
    full = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    dcp.load(full, checkpoint_id=scratch / name, process_group=control)
    dist.barrier(group=control)
    if dist.get_rank() == 0:
        shutil.rmtree(scratch)
    return full


def gather_from_local(model: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            yield name, parameter
            continue
        with torch.no_grad():
            local = parameter.to_local().to(device)
        yield name, DTensor.from_local(local, parameter.device_mesh, parameter.placements).full_tensor()


def summon_full_params(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        yield from model.named_parameters()


def read_weights_info(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, tensor in model.state_dict().items():
        yield name, (tensor.size(), tensor.dtype)


def get_optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    state: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    for name, values in state["state"].items():
        for key, value in values.items():
            yield f"{name}.{key}", value
