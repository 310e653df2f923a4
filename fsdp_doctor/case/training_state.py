"""Digests of the state from which a training step starts, and of its outcome, to compare two moments or two runs.

Digests are local to a rank and need no collective, except that every rank must train. Shards are read from their
present memory, half-moved or not.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_doctor.case import local_pieces, optimizers
from fsdp_doctor.case.findings import join_first_names, view_as_bits
from fsdp_doctor.case.reference import Reference, divide_into_batches
from fsdp_doctor.case.trainer import Trainer
from fsdp_doctor.verdict.records import Problem
from fsdp_doctor.weights.fsdp import private, reader


@dataclass(frozen=True)
class StateDigest:
    """Digest of the state from which a training step starts.

    parts: digests of all parts of that state.
    unsharded: the parameters that FSDP2 has unsharded.
    """

    parts: dict[str, tuple[str, ...]]
    unsharded: frozenset[str]


@dataclass(frozen=True)
class _StateTensor:
    """Tensor of the model or the optimizer, and this rank's part of it.

    keeps_gradient: whether the tensor's gradient survives zero_grad(), so that the gradient is not compared.
    """

    name: str
    shown: torch.Tensor
    local: torch.Tensor
    keeps_gradient: bool = False


def digest_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDigest:
    """Digests the training state of this rank.

    The training state consists of shards, buffers and their placements; which parameters train and have gradients; the
    optimizer's state, options and parameters; train or eval mode; the reduction of gradients; the mixed precision and
    the offload policy; hooks; and forwards that replace the forwards of the classes.
    """
    contents = reader.read(model)
    states = [
        _StateTensor(f"optimizer state {index}.{key}", value, private.read_local_tensor(value))
        for index, key, value in list_optimizer_states(optimizer)
    ]
    tensors = [*_list_state_tensors(contents), *states]
    state: dict[str, tuple[str, ...]] = {}
    for tensor, digest in zip(tensors, _digest_tensors([tensor.local for tensor in tensors]), strict=True):
        shown, local = tensor.shown, tensor.local
        placements = shown.placements if isinstance(shown, DTensor) else ()
        place = (str(shown.device), str(local.device), str(local.dtype), str(tuple(local.shape)), str(placements))
        role = (str(id(shown)), str(shown.requires_grad), str(tensor.keeps_gradient or shown.grad is None))
        # Of buffers and of the optimizer's state only what is in them counts: whoever moves them makes new tensors.
        state[tensor.name] = (*place, digest, *(role if isinstance(shown, nn.Parameter) else ()))
    optimized = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    state["parameters of the optimizer"] = (str(optimized),)
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    state["options of the optimizer"] = (str(options),)
    state["training mode"] = (str([module.training for module in model.modules()]),)
    state["hooks and forwards"] = (str([_list_step_hooks(module) for module in model.modules()]),)
    switches = [*(unit.switches for unit in contents.fsdp1_units), *(unit.switches for unit in contents.fsdp2_units)]
    state["reduction of the gradients"] = tuple(str(unit.effects) for unit in switches)
    modules: list[Any] = [unit.module for unit in contents.fsdp1_units]
    precisions = [module.mixed_precision for module in modules] + [u.mixed_precision for u in contents.fsdp2_units]
    state["mixed precision"] = tuple(map(str, precisions))
    state["offload policy"] = tuple(str(unit.policy) for unit in contents.fsdp2_units)
    # Between two forwards an unsharded parameter exists in addition to its shard: this costs memory, and nothing else.
    unsharded = frozenset(
        name
        for model_tensor in contents.parameters
        if model_tensor.shown is not model_tensor.tensor
        for name in model_tensor.names
    )
    return StateDigest(parts=state, unsharded=unsharded)


def _list_unsharded(model: nn.Module) -> list[str]:
    """Lists the parameters that are unsharded on this rank now: FSDP2's by first name, and FSDP1's flat parameters."""
    contents = reader.read(model)
    shown = [tensor.names[0] for tensor in contents.parameters if tensor.shown is not tensor.tensor]
    return shown + [unit.flat_name for unit in contents.fsdp1_units if unit.is_unsharded]


def find_changes(before: StateDigest, after: StateDigest) -> tuple[Problem, ...]:
    """Compares the training state before and after an extraction.

    Returns a problem if the state from which the next training step starts has changed, and another if parameters were
    left unsharded.
    """
    problems: list[Problem] = []
    was, now = before.parts, after.parts
    if changed := [name for name in sorted(was | now) if was.get(name) != now.get(name)]:
        many = f"{len(changed)} of {len(was)} parts of the training state"
        problems.append(Problem(kind="poisoned", detail=f"the extraction changed {many}: {join_first_names(changed)}"))
    if left := sorted(after.unsharded - before.unsharded):
        problems.append(Problem(kind="leak", detail=f"left unsharded: {join_first_names(left)}"))
    return tuple(problems)


def find_lost_weights(model: nn.Module, truth: Reference) -> list[str]:
    """Lists the parameters and buffers whose shard on this rank differs from the reference.

    The caller must have synchronized with the device.
    """
    contents = reader.read(model)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for unit in contents.fsdp1_units:
        expected = truth.flat[unit.flat_name]
        for index, shard in enumerate(unit.attributes_with_weights[0]):
            pairs[f"{unit.flat_name}{index or ''}"] = (shard[: expected.numel()], expected)
    for tensor in contents.list_tensors():
        if tensor.names[0] in truth.local:
            local = private.read_local_tensor(tensor.tensor).detach()
            pairs |= dict.fromkeys(tensor.names, (local, truth.local[tensor.names[0]]))
    now = _digest_tensors([actual for actual, _ in pairs.values()])
    then = _digest_tensors([expected for _, expected in pairs.values()])
    return [name for name, a, b in zip(pairs, now, then, strict=True) if a != b]


def _list_state_tensors(contents: reader.ModelContents) -> Iterator[_StateTensor]:
    for unit in contents.fsdp1_units:
        flat = unit.flat_parameter
        # With use_orig_params, zero_grad() clears only the original parameters' gradients. The flat parameter keeps its
        # gradient until the next unshard, by an extraction or a forward, drops it.
        shards, _ = unit.attributes_with_weights
        local = shards[-1] if unit.keeps_originals else flat.detach()
        yield _StateTensor(unit.flat_name, flat, local, keeps_gradient=unit.keeps_originals)
        yield from (_StateTensor(f"{unit.flat_name}, in another memory", shard, shard) for shard in shards)
        # bitsandbytes registers the codes that a forward of FSDP1 shows as a parameter, whose memory FSDP1 frees.
        there = {name: shown for name, shown in unit.shown.items() if shown.untyped_storage().nbytes()}
        yield from (_StateTensor(name, shown, shown.detach()) for name, shown in there.items())
    for tensor in (*contents.list_tensors(), *contents.transient_buffers):
        local = private.read_local_tensor(tensor.tensor).detach()
        yield from (_StateTensor(name, tensor.tensor, local) for name in tensor.names)


def _list_step_hooks(module: nn.Module) -> tuple[Any, ...]:
    """Lists the id of the forward that replaces the class's forward, if there is one, and torch's ids of the hooks."""
    own_forward = id(vars(module)["forward"]) if "forward" in vars(module) else None
    return (own_forward, *map(tuple, private.list_step_hooks(module)))


def list_optimizer_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str, Any]]:
    """Yields (number of the parameter, name of the state, its value); 8-bit state is yielded tensor by tensor."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        for key, state in optimizer.state.get(parameter, {}).items():
            yield from ((index, name, value) for name, value in optimizers.list_memories(key, state))


def _digest_tensors(tensors: list[torch.Tensor]) -> list[str]:
    """Computes a digest of each tensor's bits. Tensors of one device are copied to the host together."""
    digests = [""] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        here = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        sizes = [tensors[index].numel() * tensors[index].element_size() for index in here]
        for begin, end in divide_into_batches(sizes):
            on_host = torch.cat([view_as_bits(tensors[index].detach()) for index in here[begin:end]]).cpu()
            for index, data in zip(here[begin:end], on_host.split(sizes[begin:end]), strict=True):
                digests[index] = hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()
    return digests


StepOutcome = dict[str, str]


def train_one_step(trainer: Trainer) -> list[str]:
    """Trains one deterministic step, with the same random numbers in each run, and waits for the device.

    Returns the names of the parameters that were unsharded between forward and backward. Every rank must call it.
    """
    unsharded: list[str] = []
    device = trainer.runtime.device
    # Without an index fork_rng() saves the generators of all devices.
    devices = [] if device.type == "cpu" else [device.index]
    with use_deterministic_algorithms(), torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(trainer.num_steps)
        trainer.step(after_forward=lambda: unsharded.extend(_list_unsharded(trainer.model)))
        trainer.runtime.synchronize()
    return unsharded


def digest_step(trainer: Trainer, unsharded: list[str]) -> StepOutcome:
    """Digests the outcome of a step, and the names of the parameters that FSDP kept unsharded.

    unsharded: the result of :func:`train_one_step`.
    """
    return digest_outcome(trainer.model, trainer.optimizer) | {
        "what is unsharded between forward and backward": ", ".join(unsharded),
        "what is unsharded after the backward": ", ".join(_list_unsharded(trainer.model)),
    }


@contextlib.contextmanager
def use_deterministic_algorithms() -> Iterator[None]:
    """Context in which training steps are deterministic: two runs from the same state end in the same bits."""
    mode, settings = torch.get_deterministic_debug_mode(), cast(Any, torch.utils.deterministic)
    filling = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filling
        torch.set_deterministic_debug_mode(mode)


def digest_outcome(model: nn.Module, optimizer: torch.optim.Optimizer) -> StepOutcome:
    """Digests each shard on this rank and each of its moments, by name. The device must be synchronized."""
    values = {piece.name: _unify_nans(piece.held) for piece in local_pieces.list_model_pieces(model, {})}
    for index, key, state in list_optimizer_states(optimizer):
        values[f"{key} of parameter {index}"] = _unify_nans(private.read_local_tensor(state).detach())
    return dict(zip(values, _digest_tensors(list(values.values())), strict=True))


def _unify_nans(value: torch.Tensor) -> torch.Tensor:
    # Which NaN a load makes where it rounds depends on the device and its instructions.
    return torch.where(value.isnan(), torch.nan, value) if value.dtype in (torch.bfloat16, torch.float16) else value


def find_differences(actual: StepOutcome, expected: StepOutcome) -> list[str]:
    """Lists the names whose digests differ or exist in only one of the two outcomes."""
    return [name for name in sorted(actual | expected) if actual.get(name) != expected.get(name)]
