"""A model on four ranks, in two groups that each have half of the experts, sharded in every possible way."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from support.extraction import Tensors
from support.ranks import Setting, device_type, on_ranks, this_device, this_rank, world_size

on_four_devices = on_ranks(Setting("emulated", 4))

NUM_EXPERTS, WIDTH, HIDDEN = 8, 4, 6
NAME = "experts.up"


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(count, WIDTH, HIDDEN))


def moe(count: int) -> nn.Module:
    """Makes a layer whose norm and router have the same values on all ranks, and whose experts differ between ranks."""
    torch.manual_seed(0)
    parts = {
        "norm": nn.LayerNorm(WIDTH),
        "router": nn.Linear(WIDTH, NUM_EXPERTS, bias=False),
        "experts": Experts(count),
    }
    return nn.Sequential(OrderedDict(parts)).to(this_device())


def reference() -> Tensors:
    """Returns the weights with all experts."""
    generator = torch.Generator().manual_seed(3)
    return {name: t.cpu().clone() for name, t in moe(NUM_EXPERTS).state_dict().items()} | {
        NAME: torch.randn(NUM_EXPERTS, WIDTH, HIDDEN, generator=generator)
    }


def half_of(group: int) -> Tensors:
    """Returns the weights with the experts of one of the two groups."""
    every = reference()
    return every | {NAME: every[NAME].chunk(2)[group]}


@functools.cache
def world() -> DeviceMesh:
    return init_device_mesh(device_type(), (world_size(),), mesh_dim_names=("fsdp",))


@functools.cache
def grid(*names: str) -> DeviceMesh:
    return init_device_mesh(device_type(), (2, 2), mesh_dim_names=names)


@functools.cache
def mesh_apart(*groups: tuple[int, ...]) -> DeviceMesh:
    """Makes a mesh of this rank's group, which is not a slice of another mesh."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
    ranks = groups[group_of(groups)]
    return DeviceMesh.from_group(made[ranks], device_type(), list(ranks), mesh_dim_names=("efsdp",))


def group_of(groups: tuple[tuple[int, ...], ...]) -> int:
    """Returns the index of this rank's group."""
    return next(index for index, ranks in enumerate(groups) if this_rank() in ranks)


def _with_half(group: int) -> Any:
    model = moe(NUM_EXPERTS // 2)
    model.load_state_dict(half_of(group))
    return model


def over(mesh: DeviceMesh, groups: tuple[tuple[int, ...], ...]) -> nn.Module:
    """Shards the experts over a mesh of this rank's group, and the rest over all ranks."""
    model = _with_half(group_of(groups))
    fully_shard(model.experts, mesh=mesh)
    return fully_shard(model, mesh=world())


NEIGHBOURS, EVERY_OTHER = ((0, 1), (2, 3)), ((0, 2), (1, 3))

# Models with their groups of ranks. The experts' mesh does not tell which experts the other group has.
ON_MESHES: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[[], nn.Module]]] = {
    "neighbours": (NEIGHBOURS, lambda: over(mesh_apart(*NEIGHBOURS), NEIGHBOURS)),
    "every other": (EVERY_OTHER, lambda: over(mesh_apart(*EVERY_OTHER), EVERY_OTHER)),
    "rows of a mesh": (NEIGHBOURS, lambda: over(grid("ep", "efsdp")["efsdp"], NEIGHBOURS)),
    "columns of a mesh": (EVERY_OTHER, lambda: over(grid("efsdp", "ep")["efsdp"], EVERY_OTHER)),
    "beside tensor parallelism": (EVERY_OTHER, lambda: tensor_parallel(EVERY_OTHER, grid("efsdp", "ep")["efsdp"])),
    "fsdp1": (EVERY_OTHER, lambda: _fsdp1()),
}


def plain() -> nn.Module:
    """Makes a model whose experts FSDP ignores."""
    model = _with_half(group_of(EVERY_OTHER))
    return fully_shard(model, mesh=world(), ignored_params=set(model.experts.parameters()))


def tensor_parallel(groups: tuple[tuple[int, ...], ...], mesh: DeviceMesh | None = None) -> nn.Module:
    """Shards the router over both dimensions of a mesh, and the norm over its FSDP dimension.

    The experts are sharded over ``mesh``; without ``mesh``, over the same dimension as the norm.
    """
    model = _with_half(group_of(groups))
    parallelize_module(model, grid("fsdp", "tp")["tp"], {"router": ColwiseParallel()})
    if mesh is not None:
        fully_shard(model.experts, mesh=mesh)
    return fully_shard(model, mesh=grid("fsdp", "tp")["fsdp"])


def _fsdp1() -> nn.Module:
    model = _with_half(group_of(EVERY_OTHER))
    options: dict[str, Any] = {"device_id": this_device(), "use_orig_params": True}
    group = mesh_apart(*EVERY_OTHER).get_group()
    model.experts = FullyShardedDataParallel(model.experts, process_group=group, **options)
    return FullyShardedDataParallel(model, **options)


# Models, each with the mesh over whose ranks the experts are divided.
GATHERED: dict[str, tuple[Callable[[], nn.Module], Callable[[], DeviceMesh]]] = {
    "rows": (ON_MESHES["rows of a mesh"][1], lambda: grid("ep", "efsdp")["ep"]),
    "columns": (ON_MESHES["columns of a mesh"][1], lambda: grid("efsdp", "ep")["ep"]),
    "beside tensor parallelism": (ON_MESHES["beside tensor parallelism"][1], lambda: grid("efsdp", "ep")["ep"]),
    "another mesh of the same ranks": (ON_MESHES["every other"][1], lambda: grid("efsdp", "ep")["ep"]),
    "sharded along another dim": (lambda: _by_columns(), lambda: grid("efsdp", "ep")["ep"]),
    "offloaded": (lambda: _by_columns(offload_policy=CPUOffloadPolicy()), lambda: grid("efsdp", "ep")["ep"]),
    "plain": (lambda: plain(), lambda: grid("efsdp", "ep")["ep"]),
    "plain, on all ranks": (lambda: _plain_quarters(), world),
}


def _by_columns(**options: Any) -> nn.Module:
    model = _with_half(group_of(EVERY_OTHER))
    fully_shard(model.experts, mesh=grid("efsdp", "ep")["efsdp"], shard_placement_fn=lambda p: Shard(1), **options)
    return fully_shard(model, mesh=world(), **options)


def _plain_quarters() -> nn.Module:
    model = moe(NUM_EXPERTS // 4)
    model.load_state_dict(reference() | {NAME: reference()[NAME].chunk(4)[this_rank()]})
    return fully_shard(model, mesh=world(), ignored_params=set(model.get_submodule("experts").parameters()))


def distributed() -> nn.Module:
    """Builds a model with all experts, which are divided over one dimension of a mesh and, by FSDP, over the other."""
    model: Any = moe(NUM_EXPERTS)
    model.load_state_dict(reference())
    mesh = grid("efsdp", "ep")
    model.experts.up = nn.Parameter(distribute_tensor(model.experts.up.detach(), mesh["ep"], [Shard(0)]))
    fully_shard(model.experts, mesh=mesh["efsdp"], shard_placement_fn=lambda parameter: Shard(1))
    return fully_shard(model, mesh=world())
