"""Loaders that do something else than they promise: each is the honest one with one thing changed."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import fsdp_doctor
from fsdp_doctor import promises

State = dict[str, Any]
_NORM, _HEAD = "model.norm.weight", "lm_head.weight"
_loads = promises(direction="in")


def _load(model: nn.Module, state: State) -> None:
    fsdp_doctor.load_full_tensors(model, state)


def _local(model: nn.Module, name: str) -> torch.Tensor:
    parameter = model.get_parameter(name)
    return parameter.to_local().detach()  # type: ignore[attr-defined, no-any-return]


@_loads
def honest(model: nn.Module, state: State) -> None:
    _load(model, state)


@_loads
def loads_nothing(model: nn.Module, state: State) -> None:
    """As a load under the wrong names does with strict=False."""


@_loads
def leaves_one_out(model: nn.Module, state: State) -> None:
    before = _local(model, _NORM).clone()
    _load(model, state)
    _local(model, _NORM).copy_(before)


@_loads
def leaves_one_out_on_rank_1(model: nn.Module, state: State) -> None:
    before = _local(model, _NORM).clone()
    _load(model, state)
    if dist.get_rank() == 1:
        _local(model, _NORM).copy_(before)


@_loads
def loads_the_other_ranks_rows(model: nn.Module, state: State) -> None:
    top, bottom = state[_HEAD].chunk(2)
    _load(model, {**state, _HEAD: torch.cat([bottom, top])})


@_loads
def flips_one_bit(model: nn.Module, state: State) -> None:
    _load(model, state)
    if dist.get_rank() == 1:
        _local(model, _HEAD).view(torch.int32).view(-1)[7] ^= 1


@_loads
def rounds_through_bfloat16(model: nn.Module, state: State) -> None:
    _load(model, {name: tensor.bfloat16().float() for name, tensor in state.items()})


@_loads
def flushes_what_is_subnormal(model: nn.Module, state: State) -> None:
    smallest = torch.finfo(torch.float32).tiny
    _load(model, {name: tensor.where(tensor.abs() >= smallest, tensor * 0) for name, tensor in state.items()})


@_loads
def loses_the_sign_of_zero(model: nn.Module, state: State) -> None:
    _load(model, {name: tensor + 0.0 for name, tensor in state.items()})


@_loads
def replaces_nan(model: nn.Module, state: State) -> None:
    keep = {"posinf": torch.inf, "neginf": -torch.inf}
    _load(model, {name: tensor.nan_to_num(nan=0.0, **keep) for name, tensor in state.items()})


@_loads
def replaces_infinity(model: nn.Module, state: State) -> None:
    _load(model, {name: tensor.nan_to_num(nan=torch.nan) for name, tensor in state.items()})


@_loads
def replaces_the_parameters(model: nn.Module, state: State) -> None:
    _load(model, state)
    model.load_state_dict(dict(model.state_dict()), assign=True)


@_loads
def leaves_the_old_values_in_the_flat_parameter(model: Any, state: State) -> None:
    """FSDP1: what is loaded is in ``_local_shard``, which a state dict does not read."""
    with model.no_sync():
        pass
    flat_parameters = [unit._handle.flat_param for unit in FullyShardedDataParallel.fsdp_modules(model)]
    before = [flat.data.clone() for flat in flat_parameters]
    _load(model, state)
    for flat, old in zip(flat_parameters, before, strict=True):
        flat.data = old


@_loads
def freezes_a_parameter(model: nn.Module, state: State) -> None:
    _load(model, state)
    model.get_parameter(_NORM).requires_grad_(False)


@_loads
def leaves_one_layer_in_eval_mode(model: nn.Module, state: State) -> None:
    _load(model, state)
    model.get_submodule("model.layers.1.mlp").eval()


@_loads
def spoils_a_buffer_that_no_state_dict_has(model: nn.Module, state: State) -> None:
    _load(model, state)
    next(iter(model.buffers())).mul_(2)


@_loads
def loses_a_parameter(model: nn.Module, state: State) -> None:
    _load(model, state)
    del model.get_submodule("model.norm")._parameters["weight"]


@_loads
def loads_when_the_step_comes(model: nn.Module, state: State) -> None:
    """The weights are right until the next training step begins."""
    _load(model, state)
    shard = _local(model, _NORM)

    def spoil(*_: object) -> None:
        shard.add_(1)

    model.register_forward_pre_hook(spoil)


@_loads
def raises_on_rank_0_alone(model: nn.Module, state: State) -> None:
    if dist.get_rank() == 0:
        raise KeyError("planted on rank 0")
    dist.barrier()


@_loads
def ends_the_process_on_rank_1(model: nn.Module, state: State) -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


@promises(direction="in", loads="optimizer")
def honest_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    fsdp_doctor.load_optimizer_state(model, optimizer, state)


@promises(direction="in", loads="optimizer")
def forgets_the_moments(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    honest_optimizer(model, optimizer, state)
    optimizer.state.clear()


@promises(direction="in", loads="optimizer")
def is_a_step_behind(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    honest_optimizer(model, optimizer, state)
    for values in optimizer.state.values():
        values["step"] -= 1


@promises(direction="in", loads="optimizer")
def keeps_the_new_learning_rate(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    before = optimizer.param_groups[0]["lr"]
    honest_optimizer(model, optimizer, state)
    optimizer.param_groups[0]["lr"] = before


@promises(direction="in", loads="optimizer")
def swaps_the_moments(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    honest_optimizer(model, optimizer, state)
    for values in optimizer.state.values():
        values["exp_avg"], values["exp_avg_sq"] = values["exp_avg_sq"], values["exp_avg"]


@promises(direction="in", loads="optimizer")
def rounds_the_moments(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    honest_optimizer(model, optimizer, state)
    for values in optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].bfloat16()


@promises(direction="in", strict=False)
def skips_what_is_missing_and_says_nothing(model: nn.Module, state: State) -> None:
    fsdp_doctor.load_full_tensors(model, state, strict=False)


@promises(direction="in", strict=False)
def skips_what_is_missing_and_says_so(model: nn.Module, state: State) -> Any:
    return fsdp_doctor.load_full_tensors(model, state, strict=False)


@_loads
def skips_what_is_superfluous(model: nn.Module, state: State) -> None:
    fsdp_doctor.load_full_tensors(model, state, strict=False)


@_loads
def loads_on_one_rank(model: nn.Module, state: State) -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")
    fsdp_doctor.load_full_tensors(model, {})


@_loads
def loads_with_the_others(model: nn.Module, state: State, buffers: State) -> None:
    fsdp_doctor.load_full_tensors(model, state, buffers=buffers)
