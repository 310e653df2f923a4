"""Loaders of a saved run, right and wrong ones; and a saving run that fails as the environment says.

A worker imports this module when it starts, one that saves too: so it can change how it saves.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdp_doctor
from fsdp_doctor.case import checkpoints

_AS_IT_IS = checkpoints.save_as_frameworks


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, state: pathlib.Path) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=state)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


@fsdp_doctor.promises(direction="in", given="dcp", loads="both")
def loads_all(model: nn.Module, optimizer: torch.optim.Optimizer, state: pathlib.Path) -> None:
    _load(model, optimizer, state)


@fsdp_doctor.promises(direction="in", given="dcp", loads="both")
def loads_another_moment(model: nn.Module, optimizer: torch.optim.Optimizer, state: pathlib.Path) -> None:
    _load(model, optimizer, state)
    first = next(iter(optimizer.state.values()))
    first["exp_avg"].mul_(2)


@fsdp_doctor.promises(direction="in", given="dcp", loads="both")
def loads_all_and_trains_otherwise(model: nn.Module, optimizer: torch.optim.Optimizer, state: pathlib.Path) -> None:
    """Leaves what is right, shard by shard; only the next step tells."""
    _load(model, optimizer, state)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: _double_the_gradients(optimizer))


def _double_the_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(2)


def _save(trainer: Any, directory: pathlib.Path) -> None:
    """Rank 1 fails in the way that the environment names for the scenario; rank 0 waits for it."""
    fault = json.loads(os.environ["FSDP_DOCTOR_TEST_FAULTS"]).get(trainer.scenario.id)
    if fault is None:
        _AS_IT_IS(trainer, directory)
    elif dist.get_rank() == 1:
        _FAULTS[fault]()
    dist.barrier(group=trainer.runtime.control)


def _raise() -> None:
    raise ValueError("planted where it saves")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    if fifo := os.environ.get("FSDP_DOCTOR_TEST_FIFO"):
        pathlib.Path(fifo).write_text(str(os.getppid()))
    while True:
        signal.pause()


_FAULTS = {"raise": _raise, "die": _die, "hang": _hang}
if "FSDP_DOCTOR_TEST_FAULTS" in os.environ:
    checkpoints.save_as_frameworks = _save
