"""Sharding as verl does it: ``fully_shard`` and ``FullyShardedDataParallel``, decoder layer by decoder layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy, transformer_auto_wrap_policy
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from fsdp_doctor.case import models
from fsdp_doctor.fsdp import private
from fsdp_doctor.matrix.axes import Sharding


def shard_fsdp2(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    kind: Sharding = Sharding.FULL,
    compute_dtype: torch.dtype | None,
    policy: bool,
    pin_memory: bool,
) -> nn.Module:
    """Shards in place: each decoder layer, an untied embedding, the root. Every rank must call it.

    compute_dtype: without one there is no mixed precision.
    """
    mp_policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        mp_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload_policy = CPUOffloadPolicy(pin_memory=pin_memory) if policy else OffloadPolicy()
    units = models.find_decoder_layers(model)
    embedding = models.find_input_embedding(model)
    shard: Callable[..., Any] = private.replicate if kind is Sharding.REPLICATE else fully_shard
    options: dict[str, Any] = {"mp_policy": mp_policy, "offload_policy": offload_policy}
    if kind is Sharding.EXPERTS:
        options["shard_placement_fn"] = _place_experts_apart(model, mesh)
    if kind is Sharding.TP:
        for layer in units:
            parallelize_module(layer, mesh["tp"], _TENSOR_PARALLEL)
        mesh = mesh["fsdp"]
    for unit in (*units, *([embedding] if embedding is not None else []), model):
        shard(unit, mesh=mesh, **options)
    return model


# Of a decoder layer as transformers writes it. Not the attention: its norms see the heads of one rank alone.
_TENSOR_PARALLEL: dict[str, ParallelStyle] = {
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def _place_experts_apart(model: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Places the experts on a mesh of the same ranks with another process group."""
    apart = private.make_placement(_make_separate_mesh(mesh.device_type))
    experts = {id(parameter) for name, parameter in model.named_parameters() if ".experts." in name}
    return lambda parameter: apart if id(parameter) in experts else None


@functools.cache
def _make_separate_mesh(device_type: str) -> DeviceMesh:
    """A mesh of all ranks with another process group than the default one, which ``init_device_mesh`` would take."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=("expert_fsdp",))


def shard_fsdp1(
    model: nn.Module,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    compute_dtype: torch.dtype | None,
    policy: bool,
    use_orig_params: bool,
) -> FullyShardedDataParallel:
    """Wraps each decoder layer and the root. Every rank must call it.

    mesh: without one there is one group of all ranks. compute_dtype: without one there is no mixed precision.
    """
    strategy = ShardingStrategy.FULL_SHARD if mesh is None or mesh.ndim == 1 else ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=_wrap_policy(model),
        device_id=device,
        device_mesh=mesh,
        sharding_strategy=strategy,
        mixed_precision=_choose_mixed_precision(model, compute_dtype) if compute_dtype is not None else None,
        cpu_offload=CPUOffload(offload_params=True) if policy else None,
        use_orig_params=use_orig_params,
    )


def _choose_mixed_precision(model: nn.Module, compute_dtype: torch.dtype) -> MixedPrecision:
    return MixedPrecision(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        buffer_dtype=torch.float32,
        # peft casts what goes into an adapter to the dtype of its shards.
        cast_forward_inputs=not _are_all_trained(model),
    )


def _are_all_trained(model: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in model.parameters())


def _wrap_policy(model: nn.Module) -> Any:
    """Wraps each decoder layer; and as verl does for LoRA, each leaf that trains in a model where others are frozen.

    A flat parameter is trained as a whole or not at all.
    """
    layer_classes = {type(layer) for layer in models.find_decoder_layers(model)}
    if _are_all_trained(model):
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layer_classes)

    def is_unit(module: nn.Module) -> bool:
        trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        return type(module) in layer_classes or (trains and not any(module.children()))

    return CustomPolicy(is_unit)
