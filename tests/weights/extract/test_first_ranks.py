"""Models on other ranks than the first of the job: their own first rank collects, and each has a directory."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.extraction import raises_soon
from support.ranks import Setting, device_type, of_all_ranks, on_ranks, this_device, this_rank, together
from support.saving import new_directory
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor import (
    SaveError,
    full_state_dict,
    full_tensors,
    load_full_tensors,
    save_full_tensors,
    save_optimizer_state,
)

PAIRS = ((0, 1), (2, 3))
on_four = on_ranks(Setting("emulated", 4))


def pair() -> int:
    """The index of this rank's pair: the actor's ranks or the critic's."""
    return this_rank() // 2


def _net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5)).to(this_device())


def _on_pairs() -> nn.Module:
    meshes = [DeviceMesh(device_type(), list(ranks)) for ranks in PAIRS]
    return fully_shard(_net(pair()), mesh=meshes[pair()])


def _under_fsdp1() -> nn.Module:
    groups = [dist.new_group(list(ranks)) for ranks in PAIRS]
    return FullyShardedDataParallel(_net(pair()), groups[pair()], device_id=this_device(), use_orig_params=True)


def _under_ddp() -> nn.Module:
    groups = [dist.new_group(list(ranks)) for ranks in PAIRS]
    return DistributedDataParallel(_net(pair()), process_group=groups[pair()])


def _replicated() -> nn.Module:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(_net(0), mesh=mesh)


def _hybrid() -> nn.Module:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"device_id": this_device(), "use_orig_params": True, "device_mesh": mesh}
    return FullyShardedDataParallel(_net(0), sharding_strategy=ShardingStrategy.HYBRID_SHARD, **options)


# Each with the ranks that collect.
BUILDS: dict[str, tuple[Callable[[], nn.Module], set[int]]] = {
    "fsdp2": (_on_pairs, {0, 2}),
    "fsdp1": (_under_fsdp1, {0, 2}),
    "ddp": (_under_ddp, {0, 2}),
    "replicas": (_replicated, {0}),
    "hybrid": (_hybrid, {0}),
}


@on_four
def test_the_first_rank_of_the_model_collects_it() -> None:
    for name, (build, expected) in BUILDS.items():
        model = build()
        collected = full_state_dict(model)
        whole = full_state_dict(model, ranks="all")
        assert {rank for rank, has in enumerate(of_all_ranks(bool(collected))) if has} == expected, name
        for key, tensor in collected.items():
            assert torch.equal(tensor, whole[key])


@on_four
def test_a_model_on_other_ranks_is_loaded_from_its_first_rank() -> None:
    for build in (_on_pairs, _under_fsdp1):
        model = build()
        other = {name: tensor.cpu() + 1 for name, tensor in full_tensors(model)}
        load_full_tensors(model, other if this_rank() == PAIRS[pair()][0] else None)
        assert all(torch.equal(tensor.cpu(), other[name]) for name, tensor in full_tensors(model))


def _save(model: nn.Module, directory: pathlib.Path, **options: Any) -> None:
    save_full_tensors(model, directory, names="model", **options)


def _save_state(model: nn.Module, directory: pathlib.Path, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8, device=this_device())).square().mean().backward()
    optimizer.step()
    save_optimizer_state(model, optimizer, directory, **options)


@on_four
def test_two_models_of_a_job_cannot_both_save_to_one_directory() -> None:
    for build in (_on_pairs, _under_fsdp1):
        model = build()
        for save in (_save, _save_state):
            for overwrite in (False, True):
                with new_directory() as directory:
                    try:
                        save(model, directory, overwrite=overwrite)
                        refused = ""
                    except SaveError as error:
                        refused = str(error)
                    # At the same time: one of the two, or neither.
                    said = of_all_ranks(refused)
                    assert bool(said[0]) == bool(said[1])
                    assert bool(said[2]) == bool(said[3])
                    assert any(said), said
                    assert not all(said), said
                    if refused:
                        with raises_soon(SaveError, str(directory)):
                            save(model, directory, overwrite=overwrite)
                    together()
                    if not refused:
                        # What it has saved itself it may replace.
                        save(model, directory, overwrite=True)
                    together()
                    # By itself each has its own.
                    save(model, directory / str(pair()))
                    save(model, directory / str(pair()), overwrite=True)
