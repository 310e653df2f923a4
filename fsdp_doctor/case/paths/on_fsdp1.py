"""The extraction paths under test on FSDP1, each as frameworks write it. The names are in paths.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictType,
)

from fsdp_doctor.case.paths.inputs import Subject, to_device_then_gather
from fsdp_doctor.fsdp.names import unwrapped


def _typed(subject: Subject, kind: StateDictType, config: StateDictConfig) -> Any:
    with FullyShardedDataParallel.state_dict_type(subject.model, kind, config):
        return subject.model.state_dict()


def state_dict(subject: Subject) -> Any:
    return subject.model.state_dict()


def full_state_dict(subject: Subject) -> Any:
    return _typed(subject, StateDictType.FULL_STATE_DICT, FullStateDictConfig())


def full_state_dict_rank0_cpu(subject: Subject) -> Any:
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    return _typed(subject, StateDictType.FULL_STATE_DICT, config)


def sharded_state_dict(subject: Subject) -> Any:
    return _typed(subject, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig())


def sharded_state_dict_full_tensor(subject: Subject) -> Iterator[tuple[str, Any]]:
    for name, tensor in sharded_state_dict(subject).items():
        yield name, to_device_then_gather(tensor, subject.device)


def local_state_dict(subject: Subject) -> Any:
    return _typed(subject, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig())


def summon_full_params(subject: Subject) -> Iterator[tuple[str, Any]]:
    with FullyShardedDataParallel.summon_full_params(subject.model, writeback=False):
        for name, parameter in subject.model.named_parameters():
            yield unwrapped(name), parameter
