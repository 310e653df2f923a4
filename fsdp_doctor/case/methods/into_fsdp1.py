"""Loading methods under test that only FSDP1 has, each written as frameworks write it; see matrix/methods.toml.

This module imports nothing of this package, since ``fsdp-doctor repro`` copies its functions into scripts unchanged.
"""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)


def load_full_state_dict(model: torch.nn.Module, state: dict[str, Any]) -> Any:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.load_state_dict(state)


def load_full_state_dict_rank0(model: torch.nn.Module, state: dict[str, Any]) -> Any:
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return model.load_state_dict(state)


def load_sharded_state_dict(model: torch.nn.Module, state: dict[str, Any]) -> Any:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return model.load_state_dict(state)


def load_full_optim_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    configs = FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        flat = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
    optimizer.load_state_dict(flat)


def load_sharded_optim_state_dict(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        flat = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
    optimizer.load_state_dict(flat)


def _use_sharded_state_dict(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Returns a context with verl's configuration of FSDP1's sharded state dicts."""
    configs = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs)


def load_rank_files(model: torch.nn.Module, state: pathlib.Path) -> Any:
    file = state / f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    with _use_sharded_state_dict(model):
        return model.load_state_dict(torch.load(file, map_location="cpu", weights_only=False))


def load_rank_files_on_saved_device(model: torch.nn.Module, state: pathlib.Path) -> Any:
    file = state / f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    with _use_sharded_state_dict(model):
        return model.load_state_dict(torch.load(file, weights_only=False))


def load_rank_files_with_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: pathlib.Path
) -> Any:
    suffix = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    with _use_sharded_state_dict(model):
        result = model.load_state_dict(torch.load(state / f"model_{suffix}", map_location="cpu", weights_only=False))
        optimizer.load_state_dict(torch.load(state / f"optim_{suffix}", map_location="cpu", weights_only=False))
    return result
