"""Functions that deliver something else than they promise, or leave something behind."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_doctor

Entries = Iterator[tuple[str, torch.Tensor]]
_NORM, _HEAD = "model.norm.weight", "lm_head.weight"

_kept: list[Any] = []


def honest(model: nn.Module) -> Entries:
    """Promise and delivery agree: every fault below is this function with one thing changed."""
    yield from fsdp_doctor.full_tensors(model)


def _each(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], Entries]:
    """The honest function, but that each tensor is changed."""
    return lambda model: ((name, change(name, tensor)) for name, tensor in honest(model))


def _then(act: Callable[[Any], object]) -> Callable[[nn.Module], Entries]:
    """The honest function, and then something is done to the model."""

    def function(model: nn.Module) -> Entries:
        yield from honest(model)
        with torch.no_grad():
            act(model)

    return function


# What is yielded.


def drops_a_key(model: nn.Module) -> Entries:
    return (entry for entry in honest(model) if entry[0] != _NORM)


def invents_a_key(model: nn.Module) -> Entries:
    yield from honest(model)
    yield "model.surprise.weight", torch.zeros(1)


def yields_a_key_twice(model: nn.Module) -> Entries:
    for name, tensor in honest(model):
        yield name, tensor
        if name == _NORM:
            yield name, tensor


def swaps_two_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(honest(model))
    a, b = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]
    return tensors


def flips_one_bit(model: nn.Module) -> Entries:
    for name, tensor in honest(model):
        if name == "model.layers.1.self_attn.o_proj.weight" and dist.get_rank() == 1:
            tensor.view(torch.int32).view(-1)[7] ^= 1
        yield name, tensor


_SMALLEST = torch.finfo(torch.float32).tiny
_INFINITIES = {"posinf": torch.inf, "neginf": -torch.inf}
changes_a_shape = _each(lambda name, tensor: tensor.T.contiguous() if name == _HEAD else tensor)
flushes_what_is_subnormal = _each(lambda _, tensor: tensor.where(tensor.abs() >= _SMALLEST, tensor * 0))
loses_the_sign_of_zero = _each(lambda _, tensor: tensor + 0.0)
replaces_nan = _each(lambda _, tensor: tensor.nan_to_num(nan=0.0, **_INFINITIES))
replaces_infinity = _each(lambda _, tensor: tensor.nan_to_num(nan=torch.nan))
yields_what_has_no_data = _each(lambda n, tensor: torch.empty_like(tensor, device="meta") if n == _HEAD else tensor)
returns_bfloat16 = _each(lambda _, tensor: tensor.to(torch.bfloat16))
returns_bfloat16_and_says_so = fsdp_doctor.promises(dtype="any")(_each(lambda _, tensor: tensor.to(torch.bfloat16)))


def returns_data_on_rank_0_only(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(honest(model))
    return tensors if dist.get_rank() == 0 else {}


@fsdp_doctor.promises(ranks="rank0")
def returns_data_on_rank_0_only_and_says_so(model: nn.Module) -> dict[str, torch.Tensor]:
    return returns_data_on_rank_0_only(model)


def yields_shards(model: nn.Module) -> Any:
    return model.state_dict()


def never_ends(model: nn.Module) -> Entries:
    yield from honest(model)
    for number in itertools.count():
        yield f"model.surprise.{number}", torch.zeros(1)


@fsdp_doctor.promises(device="cpu")
def yields_what_is_in_flight(model: nn.Module) -> Entries:
    for name, tensor in honest(model):
        yield name, tensor.to("cpu", non_blocking=True)


@fsdp_doctor.promises(device="cpu")
def returns_what_is_in_flight(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(yields_what_is_in_flight(model))


@fsdp_doctor.promises(device="cpu")
def returns_what_has_arrived(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = returns_what_is_in_flight(model)
    torch.accelerator.synchronize()
    return tensors


def yields_names_that_are_none(model: nn.Module) -> Any:
    return (([name], tensor) for name, tensor in honest(model))


def raises_everywhere(model: nn.Module) -> Any:
    raise KeyError("planted on every rank")


def raises_with_the_words_of_a_full_memory(model: nn.Module) -> Any:
    raise TypeError("the policy 'kill when out of memory' takes no argument")


def raises_out_of_memory(model: nn.Module) -> Any:
    return torch.empty(1 << 60, dtype=torch.uint8)


def returns_a_number(model: nn.Module) -> Any:
    return 7


@fsdp_doctor.promises(keys="parameters", device="cpu")
def good(model: nn.Module) -> Entries:
    yield from honest(model)


good_1 = good_2 = good_3 = honest

not_a_function = "text"


# What is left behind.


def keeps_memory(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(honest(model))
    _kept.append(tensors)
    return tensors


def _first(model: nn.Module) -> Any:
    return next(model.parameters())


def _cast_a_buffer(model: nn.Module) -> None:
    first = next(iter(model.buffers()))
    first.data = first.data.double()


def _move_a_buffer(model: nn.Module) -> None:
    first = next(iter(model.buffers()))
    first.data = first.data.cpu()


def _replace_a_parameter(model: Any) -> None:
    """Replaces a parameter by an equal one, which the optimizer does not know."""
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())


def _wrap_a_forward(model: Any) -> None:
    layer = model.model.layers[0].self_attn
    layer.forward = functools.partial(layer.forward)


def _lie_in_wait_for_the_load(model: nn.Module) -> None:
    """Everything is as it was until the framework's next ``model.to(device)``."""
    original = model.to

    def to(*args: Any, **kwargs: Any) -> nn.Module:
        with torch.no_grad():
            _first(model).mul_(3)
        return original(*args, **kwargs)

    model.to = to  # type: ignore[method-assign]


def _refuse(*_: Any) -> None:
    raise RuntimeError("planted in the next training step")


def _hook(model: Any) -> Any:
    return model.model.layers[1].register_full_backward_hook(lambda module, coming, going: None)


changes_a_weight = _then(lambda model: _first(model).mul_(1.5))
changes_a_weight_on_rank_1 = _then(lambda model: _first(model).add_(1) if dist.get_rank() == 1 else None)
changes_weights_when_the_model_is_loaded = _then(_lie_in_wait_for_the_load)
leaves_eval_mode = _then(lambda model: model.eval())
freezes_a_parameter = _then(lambda model: _first(model).requires_grad_(False))
replaces_a_parameter = _then(_replace_a_parameter)
leaves_a_hook = _then(_hook)
leaves_no_hook = _then(lambda model: _hook(model).remove())
leaves_another_divisor = _then(lambda model: model.model.layers[1].set_gradient_divide_factor(4.0))
# What torch divides by anyway.
leaves_the_number_of_ranks_as_divisor = _then(lambda model: model.set_gradient_divide_factor(dist.get_world_size()))
leaves_a_layer_unsynchronized = _then(lambda model: model.model.layers[1].set_requires_gradient_sync(False))
leaves_backwards_that_do_not_end = _then(lambda model: model.set_is_last_backward(False))
leaves_a_layer_unsharded = _then(lambda model: model.model.layers[1].unshard())
wraps_a_forward = _then(_wrap_a_forward)
casts_a_buffer_of_no_state_dict = _then(_cast_a_buffer)
moves_a_buffer_of_no_state_dict = _then(_move_a_buffer)
changes_a_buffer_of_no_state_dict = _then(
    lambda model: model.model.rotary_emb.inv_freq.copy_(model.model.rotary_emb.inv_freq.flip(0))
)
breaks_the_next_step = _then(lambda model: model.register_forward_pre_hook(_refuse))


def leaves_it_synchronized(model: Any) -> Entries:
    model.set_requires_gradient_sync(False)
    yield from honest(model)
    model.set_requires_gradient_sync(True)


def leaves_a_layer_sharded_again(model: Any) -> Entries:
    model.model.layers[1].unshard()
    model.model.layers[1].reshard()
    yield from honest(model)


def changes_an_option_of_the_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Entries:
    yield from honest(model)
    optimizer.param_groups[0]["weight_decay"] = 0.5


def has_the_optimizer_do_nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> Entries:
    yield from honest(model)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
