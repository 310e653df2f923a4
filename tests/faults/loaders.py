"""Loaders that do something else than they promise: each is the honest one with one thing changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import fsdp_doctor
from fsdp_doctor import promises

State = dict[str, Any]
Loader = Callable[[nn.Module, State], None]
_NORM, _HEAD = "model.norm.weight", "lm_head.weight"
_loads = promises(direction="in")
_loads_optimizer = promises(direction="in", loads="optimizer")


def _load(model: nn.Module, state: State) -> None:
    fsdp_doctor.load_full_tensors(model, state)


def _local(model: nn.Module, name: str) -> torch.Tensor:
    parameter = model.get_parameter(name)
    return parameter.to_local().detach()  # type: ignore[attr-defined, no-any-return]


def _loads_other(change: Callable[[torch.Tensor], torch.Tensor]) -> Loader:
    """The honest loader, given other tensors."""

    def loader(model: nn.Module, state: State) -> None:
        _load(model, {name: change(tensor) for name, tensor in state.items()})

    return _loads(loader)


def _then(act: Callable[[Any], object]) -> Loader:
    """The honest loader, and then something is done to the model."""

    def loader(model: nn.Module, state: State) -> None:
        _load(model, state)
        act(model)

    return _loads(loader)


@_loads
def honest(model: nn.Module, state: State) -> None:
    _load(model, state)


@_loads
def loads_nothing(model: nn.Module, state: State) -> None:
    """Loads nothing, as a load under the wrong names does with strict=False."""


def _leave_one_out(model: nn.Module, state: State, ranks: tuple[int, ...]) -> None:
    before = _local(model, _NORM).clone()
    _load(model, state)
    if dist.get_rank() in ranks:
        _local(model, _NORM).copy_(before)


@_loads
def leaves_one_out(model: nn.Module, state: State) -> None:
    _leave_one_out(model, state, (0, 1))


@_loads
def leaves_one_out_on_rank_1(model: nn.Module, state: State) -> None:
    _leave_one_out(model, state, (1,))


@_loads
def loads_the_other_ranks_rows(model: nn.Module, state: State) -> None:
    top, bottom = state[_HEAD].chunk(2)
    _load(model, {**state, _HEAD: torch.cat([bottom, top])})


def _flip_one_bit(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        _local(model, _HEAD).view(torch.int32).view(-1)[7] ^= 1


def _first_buffer(model: nn.Module) -> torch.Tensor:
    return next(iter(model.buffers()))


def _cast_a_buffer(model: nn.Module) -> None:
    _first_buffer(model).data = _first_buffer(model).data.double()


def _move_a_buffer(model: nn.Module) -> None:
    _first_buffer(model).data = _first_buffer(model).data.cpu()


def _lose_a_parameter(model: nn.Module) -> None:
    del model.get_submodule("model.norm")._parameters["weight"]


def _lie_in_wait_for_the_step(model: nn.Module) -> None:
    shard = _local(model, _NORM)

    def spoil(*_: object) -> None:
        shard.add_(1)

    model.register_forward_pre_hook(spoil)


_SMALLEST = torch.finfo(torch.float32).tiny
_INFINITIES = {"posinf": torch.inf, "neginf": -torch.inf}
rounds_through_bfloat16 = _loads_other(lambda tensor: tensor.bfloat16().float())
flushes_what_is_subnormal = _loads_other(lambda tensor: tensor.where(tensor.abs() >= _SMALLEST, tensor * 0))
loses_the_sign_of_zero = _loads_other(lambda tensor: tensor + 0.0)
replaces_nan = _loads_other(lambda tensor: tensor.nan_to_num(nan=0.0, **_INFINITIES))
replaces_infinity = _loads_other(lambda tensor: tensor.nan_to_num(nan=torch.nan))
flips_one_bit = _then(_flip_one_bit)
replaces_the_parameters = _then(lambda model: model.load_state_dict(dict(model.state_dict()), assign=True))
freezes_a_parameter = _then(lambda model: model.get_parameter(_NORM).requires_grad_(False))
leaves_one_layer_in_eval_mode = _then(lambda model: model.get_submodule("model.layers.1.mlp").eval())
spoils_a_buffer_that_no_state_dict_has = _then(lambda model: _first_buffer(model).mul_(2))
casts_a_buffer_that_no_state_dict_has = _then(_cast_a_buffer)
moves_a_buffer_that_no_state_dict_has_to_the_host = _then(_move_a_buffer)
loses_a_parameter = _then(_lose_a_parameter)
loads_when_the_step_comes = _then(_lie_in_wait_for_the_step)


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
def refuses_every_checkpoint(model: nn.Module, state: State) -> None:
    raise KeyError("planted on every rank")


@_loads
def refuses_what_does_not_fit_and_ends_on_what_does(model: nn.Module, state: State) -> None:
    fits = state.keys() == model.state_dict().keys()
    if fits and dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()
    if not fits:
        raise KeyError("planted on every rank")


@_loads
def refuses_what_does_not_fit_and_spoils_what_does(model: nn.Module, state: State) -> None:
    _load(model, state)
    _local(model, _NORM).add_(1)


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


@_loads_optimizer
def honest_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    fsdp_doctor.load_optimizer_state(model, optimizer, state)


@_loads_optimizer
def forgets_the_moments(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    honest_optimizer(model, optimizer, state)
    optimizer.state.clear()


@_loads_optimizer
def is_a_step_behind(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    honest_optimizer(model, optimizer, state)
    for values in optimizer.state.values():
        values["step"] -= 1


@_loads_optimizer
def keeps_its_own_step_counters(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    before = [values["step"].clone() for values in optimizer.state.values()]
    honest_optimizer(model, optimizer, state)
    for values, step in zip(optimizer.state.values(), before, strict=True):
        values["step"] = step


@_loads_optimizer
def keeps_the_new_learning_rate(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    before = optimizer.param_groups[0]["lr"]
    honest_optimizer(model, optimizer, state)
    optimizer.param_groups[0]["lr"] = before


@_loads_optimizer
def swaps_the_moments(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    honest_optimizer(model, optimizer, state)
    for values in optimizer.state.values():
        values["exp_avg"], values["exp_avg_sq"] = values["exp_avg_sq"], values["exp_avg"]


@_loads_optimizer
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
