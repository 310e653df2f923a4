"""A run saved as frameworks save theirs: a distributed checkpoint, and a file for each rank."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from fsdp_doctor.case.trainer import Trainer

DCP, RANK_FILES = "dcp", "rank_files"


def save(trainer: Trainer, directory: pathlib.Path) -> None:
    """Leaves both in ``directory``, model and optimizer. Every rank must call it."""
    of_model, of_optimizer = get_state_dict(trainer.model, trainer.optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=directory / DCP)
    _save_rank_files(trainer, directory / RANK_FILES)


def _save_rank_files(trainer: Trainer, directory: pathlib.Path) -> None:
    """verl's FSDPCheckpointManager."""
    directory.mkdir(exist_ok=True)
    suffix = f"world_size_{trainer.runtime.world_size}_rank_{trainer.runtime.rank}.pt"
    with _sharded(trainer):
        torch.save(trainer.model.state_dict(), directory / f"model_{suffix}")
        torch.save(trainer.optimizer.state_dict(), directory / f"optim_{suffix}")


def _sharded(trainer: Trainer) -> contextlib.AbstractContextManager[Any]:
    if trainer.scenario.version == 2:
        return contextlib.nullcontext()
    configs = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
    return FullyShardedDataParallel.state_dict_type(trainer.model, StateDictType.SHARDED_STATE_DICT, *configs)
