"""Functions that deliver something else than they promise, or leave something behind."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_doctor

Entries = Iterator[tuple[str, torch.Tensor]]

_kept: list[Any] = []


def honest(model: nn.Module) -> Entries:
    """Promise and delivery agree: every fault below is this function with one thing changed."""
    yield from fsdp_doctor.full_tensors(model)


def drops_a_key(model: nn.Module) -> Entries:
    return (entry for entry in honest(model) if entry[0] != "model.norm.weight")


def invents_a_key(model: nn.Module) -> Entries:
    yield from honest(model)
    yield "model.surprise.weight", torch.zeros(1)


def yields_a_key_twice(model: nn.Module) -> Entries:
    for name, tensor in honest(model):
        yield name, tensor
        if name == "model.norm.weight":
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


def changes_a_shape(model: nn.Module) -> Entries:
    for name, tensor in honest(model):
        yield name, tensor.T.contiguous() if name == "lm_head.weight" else tensor


def returns_bfloat16(model: nn.Module) -> Entries:
    return ((name, tensor.to(torch.bfloat16)) for name, tensor in honest(model))


@fsdp_doctor.promises(dtype="any")
def returns_bfloat16_and_says_so(model: nn.Module) -> Entries:
    return returns_bfloat16(model)


def returns_data_on_rank_0_only(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(honest(model))
    return tensors if dist.get_rank() == 0 else {}


@fsdp_doctor.promises(ranks="rank0")
def returns_data_on_rank_0_only_and_says_so(model: nn.Module) -> dict[str, torch.Tensor]:
    return returns_data_on_rank_0_only(model)


def yields_shards(model: nn.Module) -> Any:
    return model.state_dict()


def flushes_what_is_subnormal(model: nn.Module) -> Entries:
    smallest = torch.finfo(torch.float32).tiny
    return ((name, tensor.where(tensor.abs() >= smallest, tensor * 0)) for name, tensor in honest(model))


def loses_the_sign_of_zero(model: nn.Module) -> Entries:
    return ((name, tensor + 0.0) for name, tensor in honest(model))


def replaces_nan(model: nn.Module) -> Entries:
    keep = {"posinf": torch.inf, "neginf": -torch.inf}
    return ((name, tensor.nan_to_num(nan=0.0, **keep)) for name, tensor in honest(model))


def replaces_infinity(model: nn.Module) -> Entries:
    return ((name, tensor.nan_to_num(nan=torch.nan)) for name, tensor in honest(model))


def keeps_memory(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(honest(model))
    _kept.append(tensors)
    return tensors


def changes_a_weight(model: nn.Module) -> Entries:
    yield from honest(model)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)


def changes_weights_when_the_model_is_loaded(model: nn.Module) -> Entries:
    """Leaves everything as it was, and lies in wait for the framework's next model.to(device)."""
    yield from honest(model)
    original = model.to

    def to(*args: Any, **kwargs: Any) -> nn.Module:
        with torch.no_grad():
            next(model.parameters()).mul_(3)
        return original(*args, **kwargs)

    model.to = to  # type: ignore[method-assign]


def changes_a_weight_on_rank_1(model: nn.Module) -> Entries:
    yield from honest(model)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(iter(model.parameters())).add_(1)


def leaves_eval_mode(model: nn.Module) -> Entries:
    yield from honest(model.eval())


def freezes_a_parameter(model: nn.Module) -> Entries:
    yield from honest(model)
    next(model.parameters()).requires_grad_(False)


def leaves_a_hook(model: nn.Module) -> Entries:
    yield from honest(model)
    model.model.layers[1].register_full_backward_hook(lambda module, coming, going: None)


def leaves_no_hook(model: nn.Module) -> Entries:
    handle = model.model.layers[1].register_full_backward_hook(lambda module, coming, going: None)
    yield from honest(model)
    handle.remove()


def leaves_another_divisor(model: Any) -> Entries:
    yield from honest(model)
    model.model.layers[1].set_gradient_divide_factor(4.0)


def leaves_the_number_of_ranks_as_divisor(model: Any) -> Entries:
    """What torch divides by anyway."""
    yield from honest(model)
    model.set_gradient_divide_factor(dist.get_world_size())


def leaves_a_layer_unsynchronized(model: Any) -> Entries:
    model.model.layers[1].set_requires_gradient_sync(False)
    yield from honest(model)


def leaves_it_synchronized(model: Any) -> Entries:
    model.set_requires_gradient_sync(False)
    yield from honest(model)
    model.set_requires_gradient_sync(True)


def leaves_backwards_that_do_not_end(model: Any) -> Entries:
    yield from honest(model)
    model.set_is_last_backward(False)


def leaves_a_layer_unsharded(model: Any) -> Entries:
    yield from honest(model)
    model.model.layers[1].unshard()


def leaves_a_layer_sharded_again(model: Any) -> Entries:
    model.model.layers[1].unshard()
    model.model.layers[1].reshard()
    yield from honest(model)


def wraps_a_forward(model: nn.Module) -> Entries:
    yield from honest(model)
    layer = model.model.layers[0].self_attn
    layer.forward = functools.partial(layer.forward)


def changes_a_buffer_of_no_state_dict(model: nn.Module) -> Entries:
    yield from honest(model)
    model.model.rotary_emb.inv_freq.copy_(model.model.rotary_emb.inv_freq.flip(0))


def changes_an_option_of_the_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Entries:
    yield from honest(model)
    optimizer.param_groups[0]["weight_decay"] = 0.5


def has_the_optimizer_do_nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> Entries:
    yield from honest(model)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]


def never_ends(model: nn.Module) -> Entries:
    yield from honest(model)
    for number in itertools.count():
        yield f"model.surprise.{number}", torch.zeros(1)


def yields_what_has_no_data(model: nn.Module) -> Entries:
    for name, tensor in honest(model):
        yield name, torch.empty_like(tensor, device="meta") if name == "lm_head.weight" else tensor


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


def replaces_a_parameter(model: nn.Module) -> Entries:
    """With an equal one, which the optimizer does not know."""
    yield from honest(model)
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())


def yields_names_that_are_none(model: nn.Module) -> Any:
    return (([name], tensor) for name, tensor in honest(model))


def breaks_the_next_step(model: nn.Module) -> Entries:
    yield from honest(model)

    def refuse(*_: Any) -> None:
        raise RuntimeError("planted in the next training step")

    model.register_forward_pre_hook(refuse)


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
