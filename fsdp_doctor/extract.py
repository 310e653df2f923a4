"""The fix: full tensors out of a sharded model, in every state that the matrix knows.

It reads each rank's shard where it lies, carries it to the compute device and gathers it there.
The model is never moved and never changed, so a module that ``model.to(device)`` left half-moved
(verl issue 5995) or flat shards on the CPU (verl PR 4726) are shards like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor

from fsdp_doctor.fsdp import fsdp1, fsdp2, private

# torch 2.13 deprecates the name that older versions have.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def full_tensors(model: nn.Module, *, device: torch.device | str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, full tensor) for every parameter and every persistent buffer.

    Every rank of the model's process groups must iterate to the end: each item is a collective,
    in the same order everywhere. Names are those of the model before sharding; tied parameters
    come under each of their names and share one tensor. Shapes are global, the dtype is the
    parameter's own (the fp32 masters under mixed precision). A yielded tensor belongs to the
    caller: it never aliases the model.

    model: under FSDP2 (``fully_shard``), FSDP1 (``FullyShardedDataParallel``) or neither; any
        offload; half-moved modules too.
    device: where the yielded tensors lie; by default where the model computes. The gather itself
        always runs on the compute device, so a group with NCCL alone is enough.

    Raises RuntimeError for a parameter on the meta device, before any collective.
    """
    _refuse_meta(model)
    target = torch.device(device) if device is not None else None
    for names, tensor in _gathered(model):
        moved = tensor if target is None else tensor.to(target)
        del tensor
        for name in names:
            yield name, moved
        # Not to hold this one while the next is gathered.
        del moved


def _gathered(model: nn.Module) -> Iterator[tuple[list[str], torch.Tensor]]:
    """([names], full tensor on the compute device): FSDP1's units first, then everything else."""
    in_units: set[str] = set()
    for prefix, handle in fsdp1.units(model):
        for names, tensor in _unit(prefix, handle):
            in_units.update(names)
            yield names, tensor
            del tensor
    rest: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in fsdp2.entries(model):
        if name not in in_units and not isinstance(tensor, FlatParameter):
            rest.setdefault(id(tensor), ([], tensor))[0].append(name)
    fallback = _compute_device(model)
    for names, tensor in rest.values():
        yield names, _full(tensor, fallback)


def _unit(prefix: str, handle: Any) -> Iterator[tuple[list[str], torch.Tensor]]:
    """One FSDP1 unit: one gather of the flat parameter, then a copy of each parameter out of it."""
    names, tied = fsdp1.unit_names(prefix, handle)
    shard = private.flat_shard(handle)
    flat = _gather_flat(handle, shard)
    aliases: dict[str, list[str]] = {name: [name] for name in names}
    for name, primary in tied:
        aliases[primary].append(name)
    for name, view in zip(names, private.unflatten(handle, flat), strict=True):
        yield aliases[name], view.clone()


@torch.no_grad()
def _gather_flat(handle: Any, shard: torch.Tensor) -> torch.Tensor:
    shard = shard.to(private.compute_device(handle))
    if not private.is_sharded(handle):
        return shard
    group = private.shard_group(handle)
    flat = torch.empty(shard.numel() * dist.get_world_size(group), dtype=shard.dtype, device=shard.device)
    _all_gather(flat, shard.contiguous(), group=group)
    return flat


@torch.no_grad()
def _full(tensor: torch.Tensor, fallback: torch.device) -> torch.Tensor:
    """A DTensor gathered on its mesh's device, or a copy of a plain tensor."""
    local = fsdp2.local_tensor(tensor)
    if not isinstance(tensor, DTensor):
        return local.to(fallback, copy=True)
    mesh = tensor.device_mesh
    here = local.to(_device_of(mesh.device_type))
    # Without shape and stride, from_local takes every shard to be as long as this one
    # and uneven parameters come out wrong.
    gathered = DTensor.from_local(
        here, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()
    alias = gathered.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return gathered.clone() if alias else gathered


def _compute_device(model: nn.Module) -> torch.device:
    for _, handle in fsdp1.units(model):
        return private.compute_device(handle)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return _device_of(parameter.device_mesh.device_type)
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _device_of(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _refuse_meta(model: nn.Module) -> None:
    for name, tensor in fsdp2.entries(model):
        if tensor.is_meta:
            raise RuntimeError(f"{name} is on the meta device: initialize the model before extracting it")
