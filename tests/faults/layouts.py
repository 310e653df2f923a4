"""Functions that yield DTensors of every layout, some where a full tensor was promised and some where a shard was."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fsdp_doctor
from fsdp_doctor.matrix.contracts import Contract

Entries = Iterator[tuple[str, DTensor]]
Local = Callable[[torch.Tensor], torch.Tensor]
_Function = Callable[[nn.Module], Entries]


def _promises_shards(function: _Function) -> _Function:
    function.contract = Contract(form="sharded", device="any")  # type: ignore[attr-defined]
    return function


def _placed(model: nn.Module, mesh_shape: tuple[int, ...], placements: list[Placement], local: Local) -> Entries:
    mesh = init_device_mesh("cpu", mesh_shape)
    for name, full in fsdp_doctor.full_tensors(model):
        own = local(full.cpu()).contiguous()
        yield (
            name,
            DTensor.from_local(own, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()),
        )


def _half(full: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return full.chunk(2, dim)[dist.get_rank()]


def _interleaved(full: torch.Tensor) -> torch.Tensor:
    """Interleaves half of each half of the rows."""
    return torch.cat([_half(half) for half in full.chunk(2)])


def _partial(model: nn.Module) -> Entries:
    return _placed(model, (2,), [Partial()], lambda full: full / 2)


def _strided(model: nn.Module) -> Entries:
    return _placed(model, (2,), [_StridedShard(0, split_factor=2)], _interleaved)


def _on_two_dims(model: nn.Module) -> Entries:
    return _placed(model, (1, 2), [Replicate(), Shard(0)], _half)


def partial_as_full(model: nn.Module) -> Entries:
    return _partial(model)


def strided_as_full(model: nn.Module) -> Entries:
    return _strided(model)


def on_two_dims_as_full(model: nn.Module) -> Entries:
    return _on_two_dims(model)


@_promises_shards
def partial_as_shard(model: nn.Module) -> Entries:
    return _partial(model)


@_promises_shards
def strided_as_shard(model: nn.Module) -> Entries:
    return _strided(model)


@_promises_shards
def strided_with_the_rows_of_the_other_rank(model: nn.Module) -> Entries:
    return _placed(model, (2,), [_StridedShard(0, split_factor=2)], _half)


@_promises_shards
def on_two_dims_as_shard(model: nn.Module) -> Entries:
    return _on_two_dims(model)


@_promises_shards
def sharded_by_the_last_dim(model: nn.Module) -> Entries:
    mesh = init_device_mesh("cpu", (2,))
    for name, full in fsdp_doctor.full_tensors(model):
        last = full.ndim - 1
        own = _half(full.cpu(), last).contiguous()
        yield (
            name,
            DTensor.from_local(own, mesh, [Shard(last)], run_check=False, shape=full.shape, stride=full.stride()),
        )


@_promises_shards
def replicated_as_shard(model: nn.Module) -> Entries:
    return _placed(model, (2,), [Replicate()], lambda full: full)
