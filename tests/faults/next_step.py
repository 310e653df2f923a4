"""Extractions of right values after which training goes on otherwise; and the same with all put back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.modules import module as global_hooks
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_doctor

Entries = Iterator[tuple[str, torch.Tensor]]

_entered: list[Any] = []


def honest(model: nn.Module) -> Entries:
    yield from fsdp_doctor.full_tensors(model)


def _then(act: Callable[[Any], object]) -> Callable[[nn.Module], Entries]:
    """The honest function, and then something is done to the model."""

    def function(model: nn.Module) -> Entries:
        yield from honest(model)
        act(model)

    return function


def _then_to_optimizer(act: Callable[[Any], object]) -> Callable[..., Entries]:
    def function(model: nn.Module, optimizer: torch.optim.Optimizer) -> Entries:
        yield from honest(model)
        act(optimizer)

    return function


def _layer(model: Any, number: int = 0) -> Any:
    return model.get_submodule(next(n for n, _ in model.named_modules() if n.endswith(f"layers.{number}")))


def _part(model: Any, ending: str) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith(ending))


def _double(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


# Hooks of tensors, modules, optimizers, and of all of them.


doubles_a_gradient = _then(lambda model: next(model.parameters()).register_hook(_double))
doubles_an_accumulated_gradient = _then(
    lambda model: next(model.parameters()).register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
)
scales_what_a_layer_returns = _then(
    lambda model: _part(model, "mlp").register_forward_hook(lambda module, given, result: result * 1.25)
)
scales_before_the_optimizer_steps = _then_to_optimizer(
    lambda optimizer: optimizer.register_step_pre_hook(
        lambda own, args, kwargs: own.param_groups[0].update(lr=own.param_groups[0]["lr"] * 2)
    )
)
scales_after_the_optimizer_has_stepped = _then_to_optimizer(
    lambda optimizer: optimizer.register_step_post_hook(
        lambda own, args, kwargs: [p.detach().mul_(1.5) for p in own.param_groups[0]["params"][:1]]
    )
)


def _double_gradients(own: Any, args: Any, kwargs: Any) -> None:
    for group in own.param_groups:
        group["eps"] = 1e-2


scales_before_every_optimizer_steps = _then(
    lambda model: optimizers.register_optimizer_step_pre_hook(_double_gradients)
)


def _scale_linear(module: nn.Module, given: Any, result: Any) -> Any:
    return result * 1.25 if isinstance(module, nn.Linear) else None


scales_what_every_linear_layer_returns = _then(lambda model: global_hooks.register_module_forward_hook(_scale_linear))
scales_what_every_linear_layer_is_given = _then(
    lambda model: global_hooks.register_module_forward_pre_hook(
        lambda module, given: (given[0] * 1.25,) if isinstance(module, nn.Linear) else None
    )
)
scales_every_gradient_of_a_linear_layer = _then(
    lambda model: global_hooks.register_module_full_backward_hook(
        lambda module, to, come: (to[0] * 2,) if isinstance(module, nn.Linear) and to[0] is not None else None
    )
)


# Functions and classes of torch and transformers.


def replaces_a_function_of_torch(model: nn.Module) -> Entries:
    original = functional.silu
    functional.silu = lambda given, inplace=False: original(given) * 1.25  # type: ignore[assignment]
    yield from honest(model)


def replaces_the_attention_of_torch(model: nn.Module) -> Entries:
    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = lambda *args, **kwargs: original(*args, **kwargs) * 1.25
    yield from honest(model)


def replaces_the_linear_function(model: nn.Module) -> Entries:
    original = functional.linear
    functional.linear = lambda given, weight, bias=None: original(given, weight, bias) * 1.25
    yield from honest(model)


def replaces_the_forward_of_a_class(model: nn.Module) -> Entries:
    kind = type(_part(model, "input_layernorm"))
    original = kind.forward
    kind.forward = lambda self, given: original(self, given) * 1.25  # type: ignore[method-assign]
    yield from honest(model)


def replaces_the_step_of_a_class(model: nn.Module, optimizer: torch.optim.Optimizer) -> Entries:
    kind: Any = type(optimizer)
    original = kind.step

    def step(self: Any, closure: Any = None) -> Any:
        original(self, closure)
        return original(self, closure)

    kind.step = step
    yield from honest(model)


class _DoublesSilu(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.ops.aten.silu.default else result


leaves_a_dispatch_mode_on = _then(lambda model: _DoublesSilu().__enter__())


# Attributes of modules, and the configuration.


def _change_epsilon(model: Any) -> None:
    norm = _part(model, "input_layernorm")
    norm.variance_epsilon = 0.5


def _change_scaling(model: Any) -> None:
    _part(model, "self_attn").scaling *= 2


def _set_dropout(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.attention_dropout = 0.5


def _change_activation(model: Any) -> None:
    _part(model, "mlp").act_fn = nn.GELU()


def _exchange_layers(model: Any) -> None:
    layers = _part(model, "layers")
    layers._modules["0"], layers._modules["1"] = layers._modules["1"], layers._modules["0"]


changes_an_epsilon = _then(_change_epsilon)
changes_a_scaling = _then(_change_scaling)
sets_a_dropout = _then(_set_dropout)
changes_an_activation = _then(_change_activation)
exchanges_two_layers = _then(_exchange_layers)
leaves_one_layer_in_eval_mode = _then(lambda model: _layer(model, 1).eval())
takes_a_layer_away = _then(lambda model: _part(model, "layers")._modules.pop("1"))


# Settings of FSDP.


def _fsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _set_policy(model: nn.Module, **changes: Any) -> list[tuple[Any, Any]]:
    """Does what a search for "change MixedPrecisionPolicy after fully_shard" finds; the policies of before."""
    before = []
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        before.append((module, state._mp_policy))
        _use_policy(module, dataclasses.replace(state._mp_policy, **changes))
    return before


def _use_policy(module: Any, policy: Any) -> None:
    state = module._get_fsdp_state()
    state._mp_policy = policy
    if state._fsdp_param_group is not None:
        state._fsdp_param_group.mp_policy = policy
        for parameter in state._fsdp_param_group.fsdp_params:
            parameter.init_dtype_attrs(policy)


leaves_a_policy_of_float32 = _then(
    lambda model: _set_policy(model, param_dtype=torch.float32, reduce_dtype=torch.float32)
)
leaves_a_policy_of_bfloat16_reductions = _then(lambda model: _set_policy(model, reduce_dtype=torch.bfloat16))
leaves_the_layers_unsharded_after_the_forward = _then(
    lambda model: [module.set_reshard_after_forward(False) for module in _fsdp_modules(model)]
)
leaves_one_layer_unsharded_after_the_forward = _then(lambda model: _layer(model, 0).set_reshard_after_forward(False))
leaves_the_layers_unsharded_after_the_backward = _then(
    lambda model: model.set_reshard_after_backward(False)  # type: ignore[operator]
)
leaves_gradients_unsynchronized = _then(
    lambda model: model.set_requires_gradient_sync(False)  # type: ignore[operator]
)


# Settings of the process.


leaves_gradients_off = _then(lambda model: torch.set_grad_enabled(False))
leaves_another_default_dtype = _then(lambda model: torch.set_default_dtype(torch.float64))


def leaves_inference_mode_on(model: nn.Module) -> Entries:
    yield from honest(model)
    _entered.append(torch.inference_mode())
    _entered[-1].__enter__()


def leaves_autocast_on(model: nn.Module, device: torch.device) -> Entries:
    torch.autocast(device.type, dtype=torch.float16 if device.type != "cpu" else torch.bfloat16).__enter__()
    yield from honest(model)


draws_random_numbers = _then(lambda model: torch.rand(3))
seeds_the_generators = _then(lambda model: torch.manual_seed(7))


def draws_random_numbers_of_the_device(model: nn.Module, device: torch.device) -> Entries:
    yield from honest(model)
    torch.rand(3, device=device)


# The optimizer, and what it works on.


def _halve_moments(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def _count_steps_anew(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()


def _leave_a_gradient(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


halves_the_moments = _then_to_optimizer(_halve_moments)
counts_the_steps_anew = _then_to_optimizer(_count_steps_anew)
drops_the_state_of_the_optimizer = _then_to_optimizer(lambda optimizer: optimizer.state.clear())
changes_the_learning_rate = _then_to_optimizer(lambda optimizer: optimizer.param_groups[0].update(lr=0.01))
maximizes = _then_to_optimizer(lambda optimizer: optimizer.param_groups[0].update(maximize=True))
takes_a_parameter_from_the_optimizer = _then_to_optimizer(lambda optimizer: optimizer.param_groups[0]["params"].pop())
freezes_a_layer = _then(lambda model: _layer(model, 1).requires_grad_(False))
leaves_gradients = _then(_leave_a_gradient)


# The same, with all put back.


def removes_its_hooks(model: Any, optimizer: torch.optim.Optimizer) -> Entries:
    handles = [
        next(model.parameters()).register_hook(_double),
        _part(model, "mlp").register_forward_hook(lambda module, given, result: result * 1.25),
        optimizer.register_step_pre_hook(lambda own, args, kwargs: None),
        optimizer.register_step_post_hook(lambda own, args, kwargs: None),
        global_hooks.register_module_forward_hook(_scale_linear),
        optimizers.register_optimizer_step_pre_hook(_double_gradients),
    ]
    yield from honest(model)
    for handle in handles:
        handle.remove()


def puts_functions_back(model: nn.Module) -> Entries:
    original = functional.silu, type(_part(model, "input_layernorm")).forward
    functional.silu = lambda given, inplace=False: original[0](given) * 1.25  # type: ignore[assignment]
    type(_part(model, "input_layernorm")).forward = lambda self, given: given
    try:
        yield from honest(model)
    finally:
        functional.silu, type(_part(model, "input_layernorm")).forward = original  # type: ignore[assignment, method-assign]


def puts_attributes_back(model: nn.Module) -> Entries:
    norm = _part(model, "input_layernorm")
    before, config = norm.variance_epsilon, copy.deepcopy(model.config.to_dict())
    norm.variance_epsilon = 0.5
    model.config.use_cache = not config["use_cache"]
    yield from honest(model)
    norm.variance_epsilon = before
    model.config.use_cache = config["use_cache"]


def goes_back_to_training(model: nn.Module) -> Entries:
    model.eval()
    yield from honest(model)
    model.train()


def puts_the_policy_back(model: nn.Module) -> Entries:
    before = _set_policy(model, param_dtype=torch.float32)
    yield from honest(model)
    for module, policy in before:
        _use_policy(module, policy)


def puts_the_settings_of_fsdp_back(model: Any) -> Entries:
    *layers, root = reversed(_fsdp_modules(model))
    before = [
        (module, group.post_forward_mesh_info)
        for module in [*layers, root]
        if (group := module._get_fsdp_state()._fsdp_param_group) is not None
    ]
    model.set_requires_gradient_sync(False)
    for module, _ in before:
        module.set_reshard_after_forward(False)
    yield from honest(model)
    model.set_requires_gradient_sync(True)
    for module, mesh in before:
        module._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info = mesh


def goes_on_in_contexts(model: nn.Module, device: torch.device) -> Entries:
    forked = torch.random.fork_rng([device.index], device_type=device.type)
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16), forked:
        torch.manual_seed(3)
        yield from honest(model)


def puts_the_process_back(model: nn.Module) -> Entries:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    yield from honest(model)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)


def draws_from_a_generator_of_its_own(model: nn.Module) -> Entries:
    torch.rand(3, generator=torch.Generator().manual_seed(3))
    yield from honest(model)


def freezes_and_thaws(model: nn.Module) -> Entries:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    yield from honest(model)
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def puts_the_learning_rate_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> Entries:
    (group,) = optimizer.param_groups
    before, group["lr"] = group["lr"], 0.5
    yield from honest(model)
    group["lr"] = before


def clears_its_gradients(model: nn.Module) -> Entries:
    _leave_a_gradient(model)
    yield from honest(model)
    for parameter in model.parameters():
        parameter.grad = None


def counts_its_calls_on_the_model(model: Any) -> Entries:
    """State of its own, which training never reads."""
    model.number_of_syncs = getattr(model, "number_of_syncs", 0) + 1
    model.config.last_synchronized = "now"
    yield from honest(model)


def agrees_with_the_other_ranks(model: nn.Module, control: Any) -> Entries:
    dist.barrier(group=control)
    yield from honest(model)
    dist.barrier(group=control)
