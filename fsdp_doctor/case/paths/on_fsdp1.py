"""The extraction paths under test on FSDP1, each as frameworks write it. The names are in matrix/paths.py.

Nothing of ours is imported: ``fsdp-doctor repro`` copies a function of this module into a script as it stands.
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


def state_dict(model: torch.nn.Module) -> dict[str, Any]:
    return model.state_dict()


def full_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        return model.state_dict()


def full_state_dict_rank0_cpu(model: torch.nn.Module) -> dict[str, Any]:
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return model.state_dict()


def sharded_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()):
        return model.state_dict()


def sharded_state_dict_full_tensor(model: torch.nn.Module, device: torch.device) -> Iterator[tuple[str, Any]]:
    for name, tensor in sharded_state_dict(model).items():
        yield name, tensor.to(device, non_blocking=True).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
        return model.state_dict()


def summon_full_params(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for name, parameter in model.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", ""), parameter
