"""Replacements for transformers and its Trainer, based on the source of transformers 5.22.0 to 5.24.0."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_doctor.fixes.applying import fall_back, read_global
from fsdp_doctor.fixes.moving import is_offloaded


def offload_as_accelerate_names_it(original: Callable[..., Any], arguments: Any) -> Any:
    """Replaces ``TrainingArguments._process_fsdp_args``; treats ``offload_params`` like ``cpu_offload``."""
    plugin = original(arguments)
    config = arguments.fsdp_config
    if plugin is None or not config.get("offload_params") or "cpu_offload" in config:
        return plugin
    clips = plugin["fsdp_version"] == 2 and arguments.max_grad_norm
    if clips and dist.is_initialized() and "cpu:" not in dist.get_backend_config():
        reason = 'the norm of gradients on the CPU needs a backend for it: set ddp_backend="cuda:nccl,cpu:gloo"'
        return fall_back(reason, original, arguments)
    plugin["cpu_offload"] = config["cpu_offload"] = True
    return plugin


def offload_what_was_loaded(original: Callable[..., Any], model: Any, *arguments: Any) -> Any:
    """Replaces the last functions of ``from_pretrained``; then moves shards under CPUOffloadPolicy to the CPU."""
    if not is_offloaded(model):
        return fall_back("a model that is not offloaded", original, model, *arguments)
    loaded = original(model, *arguments)
    others = [tensor for tensor in (*model.parameters(), *model.buffers()) if not isinstance(tensor, DTensor)]
    places = [tensor.device for tensor in others]
    # The sharded modules look at their parameters again.
    model.to("cpu")
    for tensor, place in zip(others, places, strict=True):
        tensor.data = tensor.data.to(place)
    return loaded


def begin_with_backend_for_cpu(original: Callable[..., Any], distributed_config: Any) -> Any:
    """Replaces ``initialize_distributed_mesh``; first makes a process group with gloo, too, if the model is offloaded.

    The original's process group cannot reduce the norm of offloaded gradients.
    """
    device = torch.accelerator.current_accelerator()
    backend = read_global(original, "DISTRIBUTED_BACKEND_MAP").get(device.type) if device is not None else None
    is_offloaded = distributed_config.fsdp_cpu_offload and distributed_config.fsdp_size > 1
    if not is_offloaded or dist.is_initialized() or device is None or backend is None:
        return fall_back("no offload, or a process group that already exists", original, distributed_config)
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(f"{device.type}:{backend},cpu:gloo")
    return original(distributed_config)
