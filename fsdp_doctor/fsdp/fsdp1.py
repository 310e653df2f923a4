"""FSDP1: sharding as verl does it, its manual offload and staging, and the flat shards at rest."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy, transformer_auto_wrap_policy

from fsdp_doctor.case import models
from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.names import unwrapped


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    compute_dtype: torch.dtype,
    policy: bool,
    use_orig_params: bool,
) -> FullyShardedDataParallel:
    """Wraps each decoder layer and the root. Every rank must call it. No mesh: one group of all ranks."""
    strategy = ShardingStrategy.FULL_SHARD if mesh is None or mesh.ndim == 1 else ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=_wrap_policy(model),
        device_id=device,
        device_mesh=mesh,
        sharding_strategy=strategy,
        mixed_precision=MixedPrecision(
            param_dtype=compute_dtype,
            reduce_dtype=torch.float32,
            buffer_dtype=torch.float32,
            # peft casts what goes into an adapter to the dtype of its shards.
            cast_forward_inputs=not _all_train(model),
        ),
        cpu_offload=CPUOffload(offload_params=True) if policy else None,
        use_orig_params=use_orig_params,
    )


def _all_train(model: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in model.parameters())


def _wrap_policy(model: nn.Module) -> Any:
    """Each decoder layer; and as verl does for LoRA, each leaf that trains in a model where others are frozen.

    A flat parameter is trained as a whole or not at all.
    """
    layer_classes = {type(layer) for layer in models.decoder_layers(model)}
    if _all_train(model):
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layer_classes)

    def is_unit(module: nn.Module) -> bool:
        trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        return type(module) in layer_classes or (trains and not any(module.children()))

    return CustomPolicy(is_unit)


@torch.no_grad()
def offload(model: FullyShardedDataParallel, *, non_blocking: bool) -> None:
    """verl's offload_fsdp_model_to_cpu."""
    private.fsdp1_lazy_init(model)
    for _, handle in private.fsdp1_units(model):
        private.flat_param_to(handle, torch.device("cpu"), non_blocking=non_blocking)


@torch.no_grad()
def load(model: FullyShardedDataParallel, device: torch.device, *, non_blocking: bool) -> None:
    """verl's load_fsdp_model_to_gpu: units under a policy stay where they are."""
    private.fsdp1_lazy_init(model)
    for _, handle in private.fsdp1_units(model):
        private.flat_param_to(handle, device, non_blocking=non_blocking)


def units(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(prefix of the unit's unwrapped names, handle), in module order."""
    for name, handle in private.fsdp1_units(model):
        prefix = unwrapped(f"{name}." if name else "")
        yield prefix, handle


def unit_names(prefix: str, handle: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """The unit's unwrapped parameter names, and (tied name, the name that it is tied to)."""
    names, tied = private.flat_names(handle)
    return (
        [unwrapped(prefix + name) for name in names],
        [(unwrapped(prefix + name), unwrapped(prefix + primary)) for name, primary in tied],
    )


def buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(unwrapped name, persistent buffer)."""
    for name, buffer in private.parameters_and_buffers(model)[1]:
        yield unwrapped(name), buffer
