"""Extraction methods under test on FSDP1, each written as frameworks write it; matrix/methods.toml has their names.

This module imports nothing of this package, since ``fsdp-doctor repro`` copies its functions into scripts unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)


def read_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    return model.state_dict()


def read_full_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        return model.state_dict()


def read_full_state_dict_on_rank0(model: torch.nn.Module) -> dict[str, Any]:
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return model.state_dict()


def read_sharded_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()):
        return model.state_dict()


def gather_sharded_state_dict(model: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, Any]]:
    for name, tensor in read_sharded_state_dict(model).items():
        yield name, tensor.to(device, non_blocking=True).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def read_local_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
        return model.state_dict()


def summon_full_params(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for name, parameter in model.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", ""), parameter
