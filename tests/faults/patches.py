"""Functions that put others in the place of torch's and leave them there: what verifies them must not use those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_doctor
from fsdp_doctor import promises

State = dict[str, Any]
_loads = promises(direction="in")
_loads_optimizer = promises(direction="in", loads="optimizer")


def _all(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(fsdp_doctor.full_tensors(model))


def _one_wrong(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = _all(model)
    return {**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1}


def _patch(place: Any, name: str, changed: Callable[..., Any]) -> None:
    original = getattr(place, name)
    setattr(place, name, lambda *arguments, **named: changed(original, *arguments, **named))


def wrong_and_all_is_equal(model: nn.Module) -> dict[str, torch.Tensor]:
    _patch(torch, "equal", lambda _, *tensors: True)
    return _one_wrong(model)


def wrong_and_bits_are_lost(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = _one_wrong(model)
    _patch(torch, "cat", lambda cat, pieces, **named: cat(list(pieces)[:1], **named))
    return tensors


def wrong_and_pieces_are_lost(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = _one_wrong(model)
    _patch(torch.Tensor, "split", lambda split, *arguments, **named: split(*arguments, **named)[:1])
    return tensors


def wrong_and_nothing_is_gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = _one_wrong(model)
    _patch(dist, "all_gather", lambda _, pieces, tensor, **named: None)
    return tensors


def right_and_nothing_is_gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = _all(model)
    _patch(dist, "all_gather", lambda _, pieces, tensor, **named: None)
    return tensors


def right_and_nothing_is_reduced(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = _all(model)
    _patch(dist, "all_reduce", lambda _, *arguments, **named: None)
    return tensors


def right_after_others(model: nn.Module) -> dict[str, torch.Tensor]:
    assert torch.equal(torch.ones(1), torch.zeros(1)) is False
    assert len(torch.ones(2).split(1)) == 2
    return _all(model)


@_loads
def loads_nothing_and_all_is_equal(model: nn.Module, state: State) -> None:
    _patch(torch, "equal", lambda _, *tensors: True)


@_loads
def loads_and_copies_nothing_after_it(model: nn.Module, state: State) -> None:
    fsdp_doctor.load_full_tensors(model, state)
    _patch(torch.Tensor, "copy_", lambda _, tensor, *arguments, **named: tensor)


@_loads_optimizer
def adds_a_param_group(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    fsdp_doctor.load_optimizer_state(model, optimizer, state)
    optimizer.param_groups.append(dict(optimizer.param_groups[0], params=[]))


@_loads_optimizer
def loses_the_param_groups(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    fsdp_doctor.load_optimizer_state(model, optimizer, state)
    optimizer.param_groups.clear()


@_loads_optimizer
def makes_the_steps_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    fsdp_doctor.load_optimizer_state(model, optimizer, state)
    for values in optimizer.state.values():
        values["step"] = int(values["step"])
