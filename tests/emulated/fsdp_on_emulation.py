"""Run under torchrun by test_emulated_fsdp.py: what PyTorch promises of FSDP, DTensor, checkpoints and collectives.

All of it on the emulated device, and compared with the same model on the CPU, unsharded, in one
process. Arguments: the names of the checks to run. Each rank prints one JSON line for each check.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import functools
import gc
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

Tensors = dict[str, torch.Tensor]
Losses = dict[tuple[int, int], float]  # of (step, rank)

STEPS = 3
SECONDS_FOR_A_CHECK = 30
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


# The model, its data and its training


@dataclasses.dataclass(frozen=True)
class Dims:
    vocabulary: int
    width: int
    hidden: int


EVEN = Dims(vocabulary=24, width=12, hidden=18)
UNEVEN = Dims(vocabulary=11, width=7, hidden=5)


class Block(nn.Module):
    def __init__(self, dims: Dims, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dims.width)
        self.up = nn.Linear(dims.width, dims.hidden)
        self.down = nn.Linear(dims.hidden, dims.width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.down(functional.gelu(self.up(self.norm(hidden)))))


class Net(nn.Module):
    def __init__(self, dims: Dims, *, checkpointed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(dims.vocabulary, dims.width)
        self.blocks = nn.ModuleList(Block(dims, dropout) for _ in range(3))
        self.head = nn.Linear(dims.width, dims.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return self.head(hidden)


def _net(dims: Dims = EVEN, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(dims, **options)


def _tokens(step: int, rank: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, vocabulary, (2, 5), generator=generator)


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    logits = getattr(logits, "logits", logits)
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def _backward(
    model: nn.Module, step: int, ranks: Sequence[int], device: torch.device, vocabulary: int = EVEN.vocabulary
) -> Losses:
    """The gradient of the mean over the ranks' batches. Where the ranks are real, each has its own only."""
    losses: Losses = {}
    for rank in ranks:
        loss = _loss(model, _tokens(step, rank, vocabulary).to(device))
        (loss / len(ranks)).backward()
        losses[step, rank] = loss.item()
    return losses


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ranks: Sequence[int] = (),
    steps: Sequence[int] = range(STEPS),
    vocabulary: int = EVEN.vocabulary,
) -> Losses:
    """Without ranks: the training of this one, on its device."""
    device = _device() if not ranks else torch.device("cpu")
    losses: Losses = {}
    for step in steps:
        losses |= _backward(model, step, ranks or [_rank()], device, vocabulary)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@functools.cache
def _trained(dims: Dims = EVEN, steps: int = STEPS) -> tuple[Tensors, Losses]:
    """On the CPU, in one process, on the batches of all ranks."""
    net = _net(dims)
    losses = _train(net, _adamw(net), ranks=_ranks(), steps=range(steps), vocabulary=dims.vocabulary)
    return _weights(net), losses


@functools.cache
def _gradients(dims: Dims = EVEN, steps: int = 1) -> Tensors:
    """On the CPU, in one process, of all ranks, summed over the steps."""
    net = _net(dims)
    for step in range(steps):
        _backward(net, step, _ranks(), torch.device("cpu"), dims.vocabulary)
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


def _weights(net: nn.Module) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


# The ranks


def _rank() -> int:
    return dist.get_rank()


def _world() -> int:
    return dist.get_world_size()


def _ranks() -> range:
    return range(_world())


def _device() -> torch.device:
    return torch.device("emulated", _rank())


@functools.cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("emulated", (_world(),))


@functools.cache
def _device_only() -> dist.ProcessGroup:
    """A group that has no backend for the CPU."""
    return dist.new_group(backend="emulated")


def _allocated() -> int:
    """What garbage held before is given back, so that nothing but the caller can change it."""
    gc.collect()
    return torch.get_device_module("emulated").memory_allocated()


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    """The same for all ranks."""
    name = [tempfile.mkdtemp() if _rank() == 0 else None]
    dist.broadcast_object_list(name)
    yield name[0]
    dist.barrier()
    if _rank() == 0:
        shutil.rmtree(name[0])


# Comparisons


def _same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.detach().cpu(), expected, rtol=0, atol=0)


def _close(actual: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    torch.testing.assert_close(actual.detach().cpu(), expected, rtol=rtol, atol=atol)


def _all(compare: Callable[[torch.Tensor, torch.Tensor], None], actual: Tensors, expected: Tensors) -> None:
    assert sorted(actual) == sorted(expected), sorted(set(actual) ^ set(expected))
    for name, tensor in actual.items():
        try:
            compare(tensor, expected[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def _close_losses(actual: Losses, expected: Losses) -> None:
    for key, loss in actual.items():
        _close(torch.tensor(loss), torch.tensor(expected[key]))


def _part(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This rank's shard, as torch.chunk deals them out: the last ranks may get less or nothing."""
    chunks = tensor.chunk(_world(), dim)
    return chunks[_rank()] if _rank() < len(chunks) else tensor.narrow(dim, 0, 0)


def _parts(tensors: Tensors, dim: int = 0) -> Tensors:
    return {name: _part(tensor, dim) for name, tensor in tensors.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shards(model: nn.Module) -> Tensors:
    return {name: _local(parameter.detach()) for name, parameter in model.named_parameters()}


def _gradient_shards(model: nn.Module) -> Tensors:
    return {name: _local(parameter.grad) for name, parameter in model.named_parameters()}


@contextlib.contextmanager
def _raises(message: str) -> Iterator[None]:
    said = "nothing was raised"
    try:
        yield
    except (RuntimeError, ValueError) as error:
        said = str(error)
    assert message in said, f"{message!r} was expected: {said}"


# FSDP2


def _sharded(net: nn.Module, **options: Any) -> nn.Module:
    for block in net.blocks:
        fully_shard(block, mesh=_mesh(), **options)
    return fully_shard(net, mesh=_mesh(), **options)


def _check_training(model: nn.Module, dims: Dims = EVEN) -> None:
    losses = _train(model, _adamw(model), vocabulary=dims.vocabulary)
    expected, expected_losses = _trained(dims)
    _close_losses(losses, expected_losses)
    _all(_close, _shards(model), _parts(expected))


@check
def fsdp2_trains_as_one_process_does() -> None:
    _check_training(_sharded(_net(), reshard_after_forward=True))


@check
def fsdp2_without_resharding_trains_as_one_process_does() -> None:
    _check_training(_sharded(_net(), reshard_after_forward=False))


@check
def fsdp2_with_uneven_shards_trains_as_one_process_does() -> None:
    _check_training(_sharded(_net(UNEVEN)), UNEVEN)


@check
def fsdp2_with_explicit_prefetching_trains_as_one_process_does() -> None:
    model = _sharded(_net())
    units = list(model.blocks)
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    _check_training(model)


@check
def fsdp2_with_activation_checkpointing_trains_as_one_process_does() -> None:
    _check_training(_sharded(_net(checkpointed=True)))


@check
def fsdp2_sharded_on_dimension_1_trains_as_one_process_does() -> None:
    model = _sharded(_net(), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    _train(model, _adamw(model))
    _all(_close, _shards(model), {name: _part(tensor, tensor.ndim - 1) for name, tensor in _trained()[0].items()})


@check
def fsdp2_on_a_mesh_of_replicas_trains_as_one_process_does() -> None:
    mesh = init_device_mesh("emulated", (_world(), 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(_net(), mesh=mesh)
    _train(model, _adamw(model))
    _all(_close, _shards(model), _trained()[0])


@check
def fsdp2_with_pinned_cpu_offload_trains_as_one_process_does() -> None:
    _check_training(_sharded(_net(UNEVEN), offload_policy=CPUOffloadPolicy(pin_memory=True)), UNEVEN)


@check
def fsdp2_with_pageable_cpu_offload_trains_as_one_process_does() -> None:
    _check_training(_sharded(_net(UNEVEN), offload_policy=CPUOffloadPolicy(pin_memory=False)), UNEVEN)


@check
def fsdp2_keeps_offloaded_shards_and_gradients_on_the_cpu_and_pinned_if_told_so() -> None:
    for pinned in (True, False):
        model = _sharded(_net(), offload_policy=CPUOffloadPolicy(pin_memory=pinned))
        _backward(model, 0, [_rank()], _device())
        shards = [*_shards(model).values(), *_gradient_shards(model).values()]
        assert {shard.device.type for shard in shards} == {"cpu"}
        assert {shard.is_pinned() for shard in _shards(model).values()} == {pinned}


@check
def fsdp2_gradients_are_those_of_one_process() -> None:
    """Of two ranks to the last bit: their sum has one order only, and halves are exact."""
    for dims in (EVEN, UNEVEN):
        model = _sharded(_net(dims))
        _backward(model, 0, [_rank()], _device(), dims.vocabulary)
        _all(_same if _world() == 2 else _close, _gradient_shards(model), _parts(_gradients(dims)))


def _mixed_precision_step(net: Net, step: int) -> None:
    """Computes in bfloat16, adds up the ranks' gradients in float32: what MixedPrecisionPolicy says."""
    for rank in _ranks():
        low = copy.deepcopy(net).bfloat16()
        low.zero_grad()
        _loss(low, _tokens(step, rank, EVEN.vocabulary)).backward()
        for parameter, its_low in zip(net.parameters(), low.parameters(), strict=True):
            gradient = its_low.grad.float() / _world()
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@check
def fsdp2_mixed_precision_trains_as_bfloat16_with_float32_sums_does() -> None:
    net, model = _net(), _sharded(_net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer, its_optimizer = _adamw(net), _adamw(model)
    for step in range(STEPS):
        _mixed_precision_step(net, step)
        optimizer.step()
        optimizer.zero_grad()
        _train(model, its_optimizer, steps=[step])
    _all(functools.partial(_close, atol=2e-3), _shards(model), _parts(_weights(net)))
    moved = (net.head.weight - _net().head.weight).abs().max()
    assert moved > 0.01, f"weights that move by {moved} cannot tell right from wrong"


@check
def fsdp2_computes_in_the_dtype_of_its_policy_and_keeps_shards_in_float32() -> None:
    model = _sharded(_net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    with torch.no_grad():
        output = model(_tokens(0, 0, EVEN.vocabulary).to(_device()))
    model.reshard()
    assert output.dtype == torch.bfloat16
    assert {shard.dtype for shard in _shards(model).values()} == {torch.float32}


@check
def fsdp2_clips_by_the_norm_of_the_whole_gradient() -> None:
    expected = torch.stack([gradient.norm() for gradient in _gradients(UNEVEN).values()]).norm()
    limit = float(expected) / 4
    for options in ({}, {"offload_policy": CPUOffloadPolicy()}):
        model = _sharded(_net(UNEVEN), **options)
        _backward(model, 0, [_rank()], _device(), UNEVEN.vocabulary)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        _close(norm.full_tensor(), expected, atol=0)
        clipped = {name: gradient / 4 for name, gradient in _gradients(UNEVEN).items()}
        _all(functools.partial(_close, atol=1e-6), _gradient_shards(model), _parts(clipped))


@check
def fsdp2_accumulates_gradients_without_communication_until_it_is_told_to_sync() -> None:
    model = _sharded(_net())
    model.set_requires_gradient_sync(False)
    for step in range(2):
        _backward(model, step, [_rank()], _device())
        assert all(parameter.grad is None for parameter in model.parameters() if isinstance(parameter, DTensor))
    model.set_requires_gradient_sync(True)
    _backward(model, 2, [_rank()], _device())
    _all(_close, _gradient_shards(model), _parts(_gradients(steps=3)))


@check
def fsdp2_divides_gradients_by_the_factor_it_is_told() -> None:
    """A reduction with PREMUL_SUM inside."""
    model = _sharded(_net())
    for unit in (*model.blocks, model):
        unit.set_gradient_divide_factor(4 * _world())
    _backward(model, 0, [_rank()], _device())
    expected = {name: gradient / 4 for name, gradient in _gradients().items()}
    _all(functools.partial(_close, atol=1e-6), _gradient_shards(model), _parts(expected))


@check
def fsdp2_unshards_by_hand_to_whole_parameters_and_frees_their_memory_again() -> None:
    model = _sharded(_net(UNEVEN))
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    expected = _weights(_net(UNEVEN))
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    before, unsharded, resharded = _allocated(), [], []
    for _ in range(2):
        for unit in units:
            unit.unshard()
        _all(_same, _weights(model), expected)
        unsharded.append(_allocated())
        for unit in units:
            unit.reshard()
        resharded.append(_allocated())
    assert min(unsharded) >= before + nbytes
    assert resharded == [before, before]
    _all(_same, _shards(model), _parts(expected))


@check
def fsdp2_unshards_asynchronously() -> None:
    model = _sharded(_net())
    handles = [unit.unshard(async_op=True) for unit in (*model.blocks, model)]
    for handle in handles:
        handle.wait()
    _all(_same, _weights(model), _weights(_net()))


@check
def fsdp2_uses_no_more_memory_after_many_steps_than_after_one() -> None:
    allocated: dict[str, list[int]] = {}
    for name, policy in (("device", OffloadPolicy()), ("cpu", CPUOffloadPolicy())):
        model = _sharded(_net(), offload_policy=policy)
        optimizer = _adamw(model)
        for step in range(4):
            _train(model, optimizer, steps=[step])
            allocated.setdefault(name, []).append(_allocated())
    assert [len(set(after_each[1:])) for after_each in allocated.values()] == [1, 1], allocated


@check
def fsdp2_holds_fewer_parameters_at_a_time_where_it_reshards_after_forward() -> None:
    peaks = {}
    for reshards in (True, False):
        model = _sharded(_net(Dims(vocabulary=6, width=120, hidden=240)), reshard_after_forward=reshards)
        before = _allocated()
        torch.get_device_module("emulated").reset_peak_memory_stats()
        with torch.no_grad():
            model(_tokens(0, 0, 6).to(_device()))
        peaks[reshards] = torch.get_device_module("emulated").max_memory_allocated() - before
    assert peaks[True] < 0.8 * peaks[False], peaks


@check
def fsdp2_moves_to_the_cpu_and_back_by_hand_and_trains_on() -> None:
    for non_blocking in (True, False):
        model = _sharded(_net())
        optimizer = _adamw(model)
        _train(model, optimizer, steps=[0])
        model.to("cpu", non_blocking=non_blocking)
        assert {shard.device.type for shard in _shards(model).values()} == {"cpu"}
        model.to(_device(), non_blocking=non_blocking)
        _train(model, optimizer, steps=range(1, STEPS))
        _all(_close, _shards(model), _parts(_trained()[0]))


@check
def checkpointed_blocks_draw_the_same_dropout_again_in_backward() -> None:
    gradients = []
    for checkpointed in (False, True):
        model = _sharded(_net(checkpointed=checkpointed, dropout=0.5))
        torch.manual_seed(7)
        _backward(model, 0, [_rank()], _device())
        gradients.append({name: shard.cpu() for name, shard in _gradient_shards(model).items()})
    _all(_same, gradients[1], gradients[0])
    assert not torch.equal(gradients[0]["head.weight"], _part(_gradients()["head.weight"]))


@check
def a_model_made_on_meta_is_materialized_and_loaded_and_trains_as_one_process_does() -> None:
    with torch.device("meta"):
        net = Net(EVEN)
    model = _sharded(net)
    model.to_empty(device=_device())
    whole = _net().state_dict() if _rank() == 0 else {}
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    _check_training(model)


@check
def a_model_made_on_meta_is_initialized_in_place_and_all_ranks_agree_on_it() -> None:
    with torch.device("meta"):
        net = Net(EVEN)
    model = _sharded(net)
    model.to_empty(device=_device())
    torch.manual_seed(3)
    nn.init.normal_(model.head.weight)
    whole = model.head.weight.full_tensor()
    everyone = [torch.empty_like(whole) for _ in _ranks()]
    dist.all_gather(everyone, whole)
    for others in everyone:
        _same(others, whole.cpu())
    assert 0.5 < whole.std().item() < 1.5
    assert whole.flatten().unique().numel() == whole.numel(), "two shards drew the same numbers"


# State dicts and checkpoints


@check
def a_state_dict_holds_shards() -> None:
    state = _sharded(_net(UNEVEN)).state_dict()
    assert {type(value) for value in state.values()} == {DTensor}
    assert {value.placements for value in state.values()} == {(Shard(0),)}
    _all(_same, {name: value.to_local() for name, value in state.items()}, _parts(_weights(_net(UNEVEN))))


@check
def a_full_tensor_is_the_parameter_before_sharding() -> None:
    for dims in (EVEN, UNEVEN):
        model = _sharded(_net(dims))
        _all(_same, {name: p.full_tensor() for name, p in model.named_parameters()}, _weights(_net(dims)))


@check
def get_model_state_dict_gives_whole_tensors_to_every_rank() -> None:
    for options in ({}, {"offload_policy": CPUOffloadPolicy()}):
        state = get_model_state_dict(_sharded(_net(UNEVEN), **options), options=StateDictOptions(full_state_dict=True))
        _all(_same, state, _weights(_net(UNEVEN)))


@check
def get_model_state_dict_with_cpu_offload_gives_whole_cpu_tensors_to_rank_0() -> None:
    state = get_model_state_dict(
        _sharded(_net(UNEVEN)), options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert {tensor.device.type for tensor in state.values()} <= {"cpu"}
    _all(_same, state, _weights(_net(UNEVEN)) if _rank() == 0 else {})


@check
def get_model_state_dict_with_cpu_offload_gives_cpu_shards() -> None:
    state = get_model_state_dict(_sharded(_net(UNEVEN)), options=StateDictOptions(cpu_offload=True))
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}
    _all(_same, {name: _local(tensor) for name, tensor in state.items()}, _parts(_weights(_net(UNEVEN))))


def _other(dims: Dims = EVEN) -> Net:
    torch.manual_seed(1)
    return Net(dims)


@check
def set_model_state_dict_restores_sharded_and_whole_states() -> None:
    sharded = get_model_state_dict(_sharded(_net(UNEVEN)))
    whole = _net(UNEVEN).state_dict()
    for offload in ({}, {"offload_policy": CPUOffloadPolicy()}):
        for state, options in ((sharded, {}), (whole, {"full_state_dict": True})):
            model = _sharded(_other(UNEVEN), **offload)
            set_model_state_dict(model, state, options=StateDictOptions(**options))
            _all(_same, _shards(model), _parts(_weights(_net(UNEVEN))))


def _resumed(options: StateDictOptions, **sharding: Any) -> None:
    """One step, then the states go to another model, which does the rest."""
    first, second = _sharded(_net(), **sharding), _sharded(_other(), **sharding)
    optimizer, another = _adamw(first), _adamw(second)
    _train(first, optimizer, steps=[0])
    set_model_state_dict(second, get_model_state_dict(first, options=options), options=options)
    state = get_optimizer_state_dict(first, optimizer, options=options)
    set_optimizer_state_dict(second, another, state, options=options)
    _train(second, another, steps=range(1, STEPS))
    _all(_close, _shards(second), _parts(_trained()[0]))


@check
def training_resumes_from_sharded_states_as_if_it_had_not_stopped() -> None:
    _resumed(StateDictOptions())


@check
def training_resumes_from_whole_states_as_if_it_had_not_stopped() -> None:
    _resumed(StateDictOptions(full_state_dict=True))


@check
def training_resumes_under_cpu_offload_as_if_it_had_not_stopped() -> None:
    _resumed(StateDictOptions(), offload_policy=CPUOffloadPolicy())


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _saved_and_resumed(save: Callable[[dict[str, Any], str], None], **sharding: Any) -> None:
    first, second = _sharded(_net(UNEVEN), **sharding), _sharded(_other(UNEVEN), **sharding)
    optimizer, another = _adamw(first), _adamw(second)
    _train(first, optimizer, steps=[0], vocabulary=UNEVEN.vocabulary)
    with _directory() as directory:
        save(_state(first, optimizer), directory)
        state = _state(second, another)
        dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(second, state["model"])
    set_optimizer_state_dict(second, another, state["optimizer"])
    _all(_same, _shards(second), {name: shard.cpu() for name, shard in _shards(first).items()})
    _train(second, another, steps=range(1, STEPS), vocabulary=UNEVEN.vocabulary)
    _all(_close, _shards(second), _parts(_trained(UNEVEN)[0]))


@check
def training_resumes_from_a_distributed_checkpoint_as_if_it_had_not_stopped() -> None:
    _saved_and_resumed(lambda state, directory: dcp.save(state, checkpoint_id=directory))


@check
def training_resumes_from_a_distributed_checkpoint_under_cpu_offload() -> None:
    policy = CPUOffloadPolicy()
    _saved_and_resumed(lambda state, directory: dcp.save(state, checkpoint_id=directory), offload_policy=policy)


@check
def training_resumes_from_a_distributed_checkpoint_that_was_saved_in_the_background() -> None:
    _saved_and_resumed(lambda state, directory: dcp.async_save(state, checkpoint_id=directory).result())


# DTensor


def _whole() -> torch.Tensor:
    return torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)


@check
def distribute_tensor_deals_out_what_rank_0_has() -> None:
    own = _whole() if _rank() == 0 else torch.zeros(7, 5)
    for placement, expected in (
        (Shard(0), _part(_whole(), 0)),
        (Shard(1), _part(_whole(), 1)),
        (Replicate(), _whole()),
    ):
        _same(distribute_tensor(own.to(_device()), _mesh(), [placement]).to_local(), expected)


@check
def redistribute_gives_what_each_placement_says() -> None:
    placements = {Shard(0): _part(_whole(), 0), Shard(1): _part(_whole(), 1), Replicate(): _whole()}
    for before in placements:
        distributed = distribute_tensor(_whole().to(_device()), _mesh(), [before])
        for after, expected in placements.items():
            _same(distributed.redistribute(placements=[after]).to_local(), expected)


@check
def redistribute_adds_up_partial_values() -> None:
    mine = (_whole() * (_rank() + 1)).to(_device())
    total = _whole() * sum(rank + 1 for rank in _ranks())
    for operation, expected in (("sum", total), ("max", _whole() * _world()), ("avg", total / _world())):
        partial = DTensor.from_local(mine, _mesh(), [Partial(operation)])
        _close(partial.redistribute(placements=[Replicate()]).to_local(), expected)
        if operation != "max":
            _close(partial.redistribute(placements=[Shard(0)]).to_local(), _part(expected))


@check
def a_dtensor_product_is_the_product_and_so_is_its_gradient() -> None:
    left, right = _whole() / 35, _whole().t().contiguous() / 35
    a = distribute_tensor(left.to(_device()), _mesh(), [Shard(1)]).requires_grad_()
    b = distribute_tensor(right.to(_device()), _mesh(), [Shard(0)]).requires_grad_()
    (a @ b).redistribute(placements=[Replicate()]).square().sum().backward()
    left.requires_grad_()
    right.requires_grad_()
    (left @ right).square().sum().backward()
    _close(a.grad.full_tensor(), left.grad)
    _close(b.grad.full_tensor(), right.grad)


# FSDP1 and DDP


def _fsdp1(net: nn.Module, **options: Any) -> FullyShardedDataParallel:
    options = {"device_id": _device(), "use_orig_params": False, **options}
    for index, block in enumerate(net.blocks):
        net.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(net, **options)


def _unwrapped(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def _summoned(model: FullyShardedDataParallel) -> Tensors:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {_unwrapped(name): tensor for name, tensor in _weights(model).items()}


def _check_fsdp1_training(**options: Any) -> None:
    for use_orig_params in (False, True):
        model = _fsdp1(_net(UNEVEN), use_orig_params=use_orig_params, **options)
        losses = _train(model, _adamw(model), vocabulary=UNEVEN.vocabulary)
        _close_losses(losses, _trained(UNEVEN)[1])
        _all(_close, _summoned(model), _trained(UNEVEN)[0])


@check
def fsdp1_trains_as_one_process_does() -> None:
    _check_fsdp1_training()


@check
def fsdp1_that_shards_gradients_only_trains_as_one_process_does() -> None:
    _check_fsdp1_training(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


@check
def fsdp1_without_sharding_trains_as_one_process_does() -> None:
    _check_fsdp1_training(sharding_strategy=ShardingStrategy.NO_SHARD)


@check
def fsdp1_with_cpu_offload_trains_as_one_process_does() -> None:
    _check_fsdp1_training(cpu_offload=CPUOffload(offload_params=True))


@check
def fsdp1_keeps_offloaded_parameters_and_gradients_on_the_cpu() -> None:
    model = _fsdp1(_net(), cpu_offload=CPUOffload(offload_params=True))
    _backward(model, 0, [_rank()], _device())
    tensors = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


@check
def fsdp1_clips_by_the_norm_of_the_whole_gradient() -> None:
    expected = torch.stack([gradient.norm() for gradient in _gradients(UNEVEN).values()]).norm()
    for use_orig_params in (False, True):
        model = _fsdp1(_net(UNEVEN), use_orig_params=use_orig_params)
        _backward(model, 0, [_rank()], _device(), UNEVEN.vocabulary)
        _close(model.clip_grad_norm_(0.5), expected, atol=0)


@check
def fsdp1_accumulates_without_communication_in_no_sync() -> None:
    model = _fsdp1(_net(), use_orig_params=True)
    with model.no_sync():
        for step in range(2):
            _backward(model, step, [_rank()], _device())
    _backward(model, 2, [_rank()], _device())
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        gradients = {_unwrapped(name): p.grad.clone() for name, p in model.named_parameters()}
    _all(_close, gradients, _gradients(steps=3))


@check
def summon_full_params_writes_back_and_frees_its_memory() -> None:
    model = _fsdp1(_net(), use_orig_params=True)
    before = _allocated()
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    after = _allocated()
    _all(_same, _summoned(model), {name: 2 * tensor for name, tensor in _weights(_net()).items()})
    assert after == before


@check
def summon_full_params_gives_cpu_tensors_to_rank_0_if_told_so() -> None:
    model = _fsdp1(_net(UNEVEN), use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, offload_to_cpu=True, rank0_only=True):
        parameters = {_unwrapped(name): tensor for name, tensor in _weights(model).items()}
    if _rank() == 0:
        assert {tensor.device.type for tensor in parameters.values()} == {"cpu"}
        _all(_same, parameters, _weights(_net(UNEVEN)))


def _fsdp1_state(model: nn.Module, kind: StateDictType, config: Any = None) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, kind, config):
        return model.state_dict()


@check
def an_fsdp1_full_state_dict_holds_whole_tensors() -> None:
    for use_orig_params in (False, True):
        model = _fsdp1(_net(UNEVEN), use_orig_params=use_orig_params)
        _all(_same, _fsdp1_state(model, StateDictType.FULL_STATE_DICT), _weights(_net(UNEVEN)))
        on_rank_0 = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        state = _fsdp1_state(model, StateDictType.FULL_STATE_DICT, on_rank_0)
        assert {tensor.device.type for tensor in state.values()} <= {"cpu"}
        _all(_same, state, _weights(_net(UNEVEN)) if _rank() == 0 else {})


@check
def an_fsdp1_sharded_state_dict_holds_dtensors_and_loads() -> None:
    for offload in (True, False):
        model = _fsdp1(_net(UNEVEN), device_mesh=_mesh())
        config = ShardedStateDictConfig(offload_to_cpu=offload)
        state = _fsdp1_state(model, StateDictType.SHARDED_STATE_DICT, config)
        assert {type(value) for value in state.values()} == {DTensor}
        assert {value.to_local().device.type for value in state.values()} == {"cpu" if offload else "emulated"}
        _all(_same, {name: value.to_local() for name, value in state.items()}, _parts(_weights(_net(UNEVEN))))
        other = _fsdp1(_other(UNEVEN), device_mesh=_mesh())
        with FullyShardedDataParallel.state_dict_type(other, StateDictType.SHARDED_STATE_DICT, config):
            other.load_state_dict(state)
        _all(_same, _summoned(other), _weights(_net(UNEVEN)))


@check
def an_fsdp1_sharded_state_dict_without_a_mesh_is_saved_and_loaded_by_dcp() -> None:
    model, other = _fsdp1(_net(UNEVEN)), _fsdp1(_other(UNEVEN))
    state = _fsdp1_state(other, StateDictType.SHARDED_STATE_DICT)
    with _directory() as directory:
        dcp.save(_fsdp1_state(model, StateDictType.SHARDED_STATE_DICT), checkpoint_id=directory)
        dcp.load(state, checkpoint_id=directory)
    with FullyShardedDataParallel.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        other.load_state_dict(state)
    _all(_same, _summoned(other), _weights(_net(UNEVEN)))


@check
def an_fsdp1_local_state_dict_loads() -> None:
    model, other = _fsdp1(_net()), _fsdp1(_other())
    state = _fsdp1_state(model, StateDictType.LOCAL_STATE_DICT)
    with FullyShardedDataParallel.state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
        other.load_state_dict(state)
    _all(_same, _summoned(other), _weights(_net()))


@check
def fsdp1_training_resumes_from_whole_states_as_if_it_had_not_stopped() -> None:
    configs = (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    )
    first, second = (_fsdp1(net, use_orig_params=True) for net in (_net(), _other()))
    optimizer, another = _adamw(first), _adamw(second)
    _train(first, optimizer, steps=[0])
    with FullyShardedDataParallel.state_dict_type(first, *configs):
        weights, state = first.state_dict(), FullyShardedDataParallel.optim_state_dict(first, optimizer)
    with FullyShardedDataParallel.state_dict_type(second, *configs):
        second.load_state_dict(weights)
        another.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(second, another, state))
    _train(second, another, steps=range(1, STEPS))
    _all(_close, _summoned(second), _trained()[0])


@check
def fsdp1_offloaded_by_hand_frees_its_shards_and_trains_on() -> None:
    from fsdp_doctor.case import offloading
    from fsdp_doctor.fsdp import private

    freed, shards = [], []
    for use_orig_params, non_blocking in itertools.product((True, False), (True, False)):
        model = _fsdp1(_net(), use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _train(model, optimizer, steps=[0])
        shards.append(sum(_blocks(private.flat_shard(handle)) for _, handle in private.fsdp1_units(model)))
        before = _allocated()
        offloading.offload(model, non_blocking=non_blocking)
        freed.append(before - _allocated())
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        offloading.load(model, _device(), non_blocking=non_blocking)
        _train(model, optimizer, steps=range(1, STEPS))
        _all(_close, _summoned(model), _trained_with_sgd())
    assert freed == shards


def _blocks(tensor: torch.Tensor) -> int:
    """What the device counts for a tensor."""
    return -(-tensor.nbytes // 512) * 512


@functools.cache
def _trained_with_sgd() -> Tensors:
    net = _net()
    _train(net, torch.optim.SGD(net.parameters(), lr=0.1), ranks=_ranks())
    return _weights(net)


@check
def ddp_trains_as_one_process_does() -> None:
    model = DistributedDataParallel(_net().to(_device()))
    losses = _train(model, _adamw(model))
    _close_losses(losses, _trained()[1])
    _all(_close, _weights(model.module), _trained()[0])


@check
def ddp_gives_every_rank_the_weights_of_rank_0_and_syncs_after_no_sync() -> None:
    model = DistributedDataParallel((_net() if _rank() == 0 else _other()).to(_device()))
    _all(_same, _weights(model.module), _weights(_net()))
    with model.no_sync():
        _backward(model, 0, [_rank()], _device())
    _backward(model, 1, [_rank()], _device())
    _all(_close, _gradient_shards(model.module), _gradients(steps=2))


# LoRA


@functools.cache
def _lora_template() -> nn.Module:
    import peft
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights="gaussian")
    return peft.get_peft_model(Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)), adapters)


@functools.cache
def _trained_lora() -> Tensors:
    model = copy.deepcopy(_lora_template())
    _train(model, _adamw(model), ranks=_ranks())
    return _weights(model)


def _check_lora(**options: Any) -> None:
    model = copy.deepcopy(_lora_template())
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=_mesh(), **options)
    fully_shard(model, mesh=_mesh(), **options)
    before = {name: shard.cpu().clone() for name, shard in _shards(model).items()}
    _train(model, _adamw(model))
    after = {name: shard.cpu() for name, shard in _shards(model).items()}
    _all(_close, after, _parts(_trained_lora()))
    for name, shard in after.items():
        changed = not torch.equal(shard, before[name])
        assert changed == ("lora_" in name and shard.numel() > 0), f"{name}: changed {changed}"


@check
def lora_under_fsdp2_trains_the_adapters_and_nothing_else() -> None:
    _check_lora()


@check
def lora_under_cpu_offload_trains_the_adapters_and_nothing_else() -> None:
    _check_lora(offload_policy=CPUOffloadPolicy())


# Collectives


def _own(rank: int | None = None, numel: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank brings, on the CPU: different everywhere, small enough to be exact in bfloat16."""
    return (torch.arange(1, numel + 1) + 4 * (_rank() if rank is None else rank)).to(dtype)


def _everyone(dtype: torch.dtype = torch.float32, numel: int = 4) -> torch.Tensor:
    return torch.stack([_own(rank, numel, dtype) for rank in _ranks()])


def _empty(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(sizes, -1, dtype=dtype, device=_device())


_REDUCTIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda all_ranks: all_ranks.sum(0),
    dist.ReduceOp.AVG: lambda all_ranks: all_ranks.sum(0) / _world(),
    dist.ReduceOp.MAX: lambda all_ranks: all_ranks.amax(0),
    dist.ReduceOp.MIN: lambda all_ranks: all_ranks.amin(0),
    dist.ReduceOp.PRODUCT: lambda all_ranks: all_ranks.prod(0),
}


@check
def all_reduce_reduces() -> None:
    for operation, expected in _REDUCTIONS.items():
        for dtype in (torch.float32, torch.bfloat16):
            tensor = _own(dtype=dtype).to(_device())
            dist.all_reduce(tensor, operation)
            _same(tensor, expected(_everyone()).to(dtype))


@check
def all_reduce_reduces_integers_and_booleans() -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8):
        tensor = _own(dtype=dtype).to(_device())
        dist.all_reduce(tensor)
        _same(tensor, _everyone().sum(0).to(dtype))
    bits = (1 << _own(dtype=torch.int64)).to(_device())
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    _same(bits, functools.reduce(torch.bitwise_or, 1 << _everyone(torch.int64)))
    anyone = torch.tensor([_rank() == 0, False], device=_device())
    dist.all_reduce(anyone, dist.ReduceOp.MAX)
    _same(anyone, torch.tensor([True, False]))


@check
def a_premultiplied_sum_multiplies_first() -> None:
    for factor in (0.5, torch.tensor([0.5], device=_device())):
        operation = dist._make_nccl_premul_sum(factor)
        tensor, part = _own().to(_device()), _empty(2)
        dist.all_reduce(tensor, operation)
        _same(tensor, _everyone().sum(0) / 2)
        dist.reduce_scatter_tensor(part, _own(numel=2 * _world()).to(_device()), operation)
        _same(part, _part(_everyone(numel=2 * _world()).sum(0)) / 2)


@check
def broadcast_gives_everyone_what_the_source_has() -> None:
    for source in _ranks():
        tensor = _own().to(_device())
        dist.broadcast(tensor, source)
        _same(tensor, _own(source))


@check
def reduce_reduces_to_one_rank_and_leaves_the_others_alone() -> None:
    for root in _ranks():
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            tensor = _own().to(_device())
            dist.reduce(tensor, root, operation)
            _same(tensor, _REDUCTIONS[operation](_everyone()) if _rank() == root else _own())


@check
def all_gather_gathers() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        outputs = [_empty(4, dtype=dtype) for _ in _ranks()]
        dist.all_gather(outputs, _own(dtype=dtype).to(_device()))
        _same(torch.stack(outputs), _everyone(dtype))


@check
def all_gather_gathers_tensors_of_different_sizes() -> None:
    """NCCL does it, by a broadcast from each rank."""
    outputs = [_empty(rank + 1) for rank in _ranks()]
    work = dist.all_gather(outputs, _own(numel=_rank() + 1).to(_device()), group=dist.new_group(), async_op=True)
    assert _completes(work), "it is not complete after 2 seconds"
    for rank, output in enumerate(outputs):
        _same(output, _own(rank, rank + 1))


@check
def all_gather_into_tensor_joins() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        output = _empty(4 * _world(), dtype=dtype)
        dist.all_gather_into_tensor(output, _own(dtype=dtype).to(_device()))
        _same(output, _everyone(dtype).flatten())


@check
def all_gather_into_tensor_stacks() -> None:
    output = _empty(_world(), 4)
    dist.all_gather_into_tensor(output, _own().to(_device()))
    _same(output, _everyone())
    scalars = _empty(_world())
    dist.all_gather_into_tensor(scalars, _own()[0].to(_device()))
    _same(scalars, _everyone()[:, 0])


@check
def all_gather_into_tensor_gathers_in_place() -> None:
    output = _empty(4 * _world())
    own = output.view(_world(), 4)[_rank()]
    own.copy_(_own())
    dist.all_gather_into_tensor(output, own)
    _same(output, _everyone().flatten())


@check
def reduce_scatter_reduces_and_deals_out() -> None:
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        for dtype in (torch.float32, torch.bfloat16):
            own = _own(numel=2 * _world(), dtype=dtype).to(_device())
            expected = _part(_REDUCTIONS[operation](_everyone(numel=2 * _world())).to(dtype))
            from_list, from_tensor = _empty(2, dtype=dtype), _empty(2, dtype=dtype)
            dist.reduce_scatter(from_list, list(own.chunk(_world())), operation)
            dist.reduce_scatter_tensor(from_tensor, own, operation)
            _same(from_list, expected)
            _same(from_tensor, expected)
            _same(own, _own(numel=2 * _world(), dtype=dtype))


@check
def gather_gathers_to_one_rank() -> None:
    for root in _ranks():
        outputs = [_empty(4) for _ in _ranks()] if _rank() == root else None
        dist.gather(_own().to(_device()), outputs, root)
        if outputs is not None:
            _same(torch.stack(outputs), _everyone())


@check
def scatter_deals_out_what_one_rank_has() -> None:
    for root in _ranks():
        inputs = list((_everyone() + root).to(_device())) if _rank() == root else None
        output = _empty(4)
        dist.scatter(output, inputs, root)
        _same(output, _own() + root)


@check
def all_to_all_single_exchanges_equal_parts() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        output = _empty(2 * _world(), dtype=dtype)
        dist.all_to_all_single(output, _own(numel=2 * _world(), dtype=dtype).to(_device()))
        _same(output, torch.cat([_part(_own(rank, 2 * _world(), dtype)) for rank in _ranks()]))


def _sent(source: int, target: int) -> torch.Tensor:
    """Rows of different number for each pair of ranks, none for some."""
    return torch.full(((source + 2 * target) % 3, 2), 10.0 * source + target)


@check
def all_to_all_single_exchanges_parts_of_different_sizes() -> None:
    sent = [_sent(_rank(), target) for target in _ranks()]
    received = [_sent(source, _rank()) for source in _ranks()]
    output = _empty(sum(map(len, received)), 2)
    dist.all_to_all_single(output, torch.cat(sent).to(_device()), [*map(len, received)], [*map(len, sent)])
    _same(output, torch.cat(received))


@check
def all_to_all_exchanges_tensors_of_one_size() -> None:
    outputs = [_empty(2) for _ in _ranks()]
    dist.all_to_all(outputs, [torch.full((2,), 10.0 * _rank() + target, device=_device()) for target in _ranks()])
    _same(torch.stack(outputs)[:, 0], torch.tensor([10.0 * source + _rank() for source in _ranks()]))


@check
def all_to_all_exchanges_tensors_of_different_sizes() -> None:
    received = [_sent(source, _rank()) for source in _ranks()]
    outputs = [_empty(*tensor.shape) for tensor in received]
    dist.all_to_all(outputs, [_sent(_rank(), target).to(_device()) for target in _ranks()])
    for output, expected in zip(outputs, received, strict=True):
        _same(output, expected)


def _neighbours() -> tuple[int, int]:
    return (_rank() + 1) % _world(), (_rank() - 1) % _world()


@check
def send_and_recv_pass_tensors_round() -> None:
    following, previous = _neighbours()
    output = _empty(4)
    if _rank() == 0:
        dist.send(_own().to(_device()), following)
        dist.recv(output, previous)
    else:
        dist.recv(output, previous)
        dist.send(_own().to(_device()), following)
    _same(output, _own(previous))


@check
def isend_and_irecv_pass_tensors_round() -> None:
    following, previous = _neighbours()
    output = _empty(4)
    works = [dist.irecv(output, previous), dist.isend(_own().to(_device()), following)]
    for work in works:
        work.wait()
        assert work.is_completed()
    _same(output, _own(previous))


@check
def batched_sends_and_receives_pass_tensors_round() -> None:
    following, previous = _neighbours()
    outputs, sent = [_empty(4), _empty(4)], [_own().to(_device()), -_own().to(_device())]
    sends = [dist.P2POp(dist.isend, tensor, following) for tensor in sent]
    receives = [dist.P2POp(dist.irecv, output, previous) for output in outputs]
    for work in dist.batch_isend_irecv([*sends, *receives]):
        work.wait()
    _same(outputs[0], _own(previous))
    _same(outputs[1], -_own(previous))


@check
def a_barrier_holds_everyone_until_the_last_has_come() -> None:
    for group in (None, _device_only()):
        last = _world() - 1
        arrived = torch.zeros(1, dtype=torch.float64)
        dist.barrier(group)
        if _rank() == last:
            time.sleep(0.3)
            arrived += time.time()
        dist.barrier(group)
        left = time.time()
        dist.broadcast(arrived, last)
        assert left >= float(arrived), f"a rank left {float(arrived) - left} seconds before the last one came"


@check
def objects_are_passed_in_groups_with_and_without_a_cpu_backend() -> None:
    for group in (None, _device_only()):
        everyone: list[Any] = [None] * _world()
        dist.all_gather_object(everyone, {"rank": _rank()}, group)
        assert everyone == [{"rank": rank} for rank in _ranks()]
        told = ["from", _rank()]
        dist.broadcast_object_list(told, 1, group)
        assert told == ["from", 1]
        gathered = [None] * _world() if _rank() == 0 else None
        dist.gather_object(_rank(), gathered, 0, group)
        assert gathered == (list(_ranks()) if _rank() == 0 else None)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"for {rank}" for rank in _ranks()], 0, group)
        assert mine == [f"for {_rank()}"]


def _completes(work: dist.Work, seconds: float = 2) -> bool:
    end = time.monotonic() + seconds
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.01)
    return work.is_completed()


@check
def asynchronous_work_is_complete_when_all_ranks_have_come() -> None:
    dist.barrier()
    tensor = _own().to(_device())
    if _rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert not _completes(work, 0.2)
        dist.barrier(_control())
    else:
        dist.barrier(_control())
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    _same(tensor, _everyone().sum(0))


@check
def the_future_of_a_work_holds_its_outputs() -> None:
    tensor = _own().to(_device())
    doubled = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    _same(doubled.wait(), 2 * _everyone().sum(0))


@check
def works_complete_in_any_order_of_waiting() -> None:
    tensors = [(_own() + index).to(_device()) for index in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for index in reversed(range(20)):
        works[index].wait()
        _same(tensors[index], (_everyone() + index).sum(0))


@check
def coalesced_collectives_are_complete_when_the_manager_is() -> None:
    """The first tensor takes longer than the second, so it is the one that may not be there yet."""
    ones = [torch.ones(numel, device=_device()) for numel in (1_000_000, 4)]
    with dist._coalescing_manager(async_ops=True) as reductions:
        for tensor in ones:
            dist.all_reduce(tensor)
    reductions.wait()
    whole = [_empty(tensor.numel() * _world()) for tensor in ones]
    with dist._coalescing_manager(async_ops=True) as gathers:
        for output, tensor in zip(whole, ones, strict=True):
            dist.all_gather_into_tensor(output, tensor)
    gathers.wait()
    reduced = [tensor.cpu() for tensor in (*ones, *whole)]
    with dist._coalescing_manager(async_ops=True) as scatters:
        for output, tensor in zip(ones, whole, strict=True):
            dist.reduce_scatter_tensor(output, tensor)
    scatters.wait()
    scattered = [tensor.cpu() for tensor in ones]
    for tensor in reduced:
        _same(tensor, torch.full_like(tensor, _world()))
    for tensor in scattered:
        _same(tensor, torch.full_like(tensor, _world() ** 2))


@check
def a_coalescing_manager_takes_a_device() -> None:
    group, tensors = dist.new_group(), [_own().to(_device()), -_own().to(_device())]
    with dist._coalescing_manager(group, device=_device()):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    _same(torch.stack(tensors), torch.stack([_everyone().sum(0), -_everyone().sum(0)]))


@check
def works_of_one_group_complete_in_the_order_of_their_calls() -> None:
    """A group of NCCL has one stream, so who waits for the last has waited for all."""
    tensors = [torch.ones(numel, device=_device()) for numel in (1_000_000, 1)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[-1].wait()
    assert works[0].is_completed()
    _same(tensors[0], torch.full((1_000_000,), float(_world())))


@check
def what_a_collective_was_given_is_counted_off_when_it_is_freed() -> None:
    before, after = _allocated(), []
    for _ in range(50):
        dist.all_reduce(_empty(1000))
        dist.all_gather_into_tensor(_empty(1000 * _world()), _empty(1000))
        after.append(torch.get_device_module("emulated").memory_allocated())
    assert after == [before] * 50, f"{before} before, {sorted(set(after))} after"


@check
def functional_collectives_give_what_they_say() -> None:
    own, wide = _own().to(_device()), _own(numel=2 * _world()).to(_device())
    _same(funcol.all_reduce(own, "avg", _mesh()), _everyone().sum(0) / _world())
    _same(funcol.all_gather_tensor(own, 0, _mesh()), _everyone().flatten())
    _same(funcol.reduce_scatter_tensor(wide, "sum", 0, _mesh()), _part(_everyone(numel=2 * _world()).sum(0)))
    exchanged = torch.cat([_part(_own(rank, 2 * _world())) for rank in _ranks()])
    _same(funcol.all_to_all_single(wide, None, None, _mesh()), exchanged)
    _same(funcol.broadcast(own, 1, _mesh()), _own(1))
    many = funcol.all_gather_into_tensor_coalesced([own, own + 1], dist.group.WORLD)
    _same(torch.stack(list(many)), torch.stack([_everyone().flatten(), _everyone().flatten() + 1]))
    _same(own, _own())


@check
def a_group_of_some_ranks_leaves_the_others_out() -> None:
    members = [0, _world() - 1]
    group = dist.new_group(members)
    tensor = _own().to(_device())
    if _rank() in members:
        dist.all_reduce(tensor, group=group)
    _same(tensor, _own(0) + _own(_world() - 1) if _rank() in members else _own())
    alone, _ = dist.new_subgroups(1)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=alone)
    _same(tensor, _own(0) + _own(_world() - 1) if _rank() in members else _own())


@check
def groups_that_ranks_use_in_different_order_do_not_wait_for_each_other() -> None:
    groups = [dist.new_group(), dist.new_group()]
    order = (0, 1) if _rank() % 2 == 0 else (1, 0)
    tensors = [_own().to(_device()), -_own().to(_device())]
    for _ in range(10):
        works = [dist.all_reduce(tensors[index], dist.ReduceOp.AVG, groups[index], async_op=True) for index in order]
        for work in works:
            work.wait()
    _close(tensors[0], _everyone().mean(0))
    _close(tensors[1], -_everyone().mean(0))


@check
def a_collective_sees_the_copies_that_its_stream_holds() -> None:
    for stream in (None, torch.Stream(_device())):
        with torch.get_device_module("emulated").stream(stream):
            tensor = _empty(4)
            tensor.copy_(_own().pin_memory(), non_blocking=True)
            dist.all_reduce(tensor)
            _same(tensor, _everyone().sum(0))


# Refusals


@check
def a_group_of_the_device_alone_refuses_cpu_tensors() -> None:
    with _raises("No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=_device_only())


@check
def a_group_of_the_cpu_alone_refuses_tensors_of_the_device() -> None:
    with _raises("No backend type associated with device type emulated"):
        dist.all_reduce(_empty(1), group=_control())


@check
def a_full_tensor_of_offloaded_shards_is_refused_without_a_cpu_backend() -> None:
    mesh = DeviceMesh.from_group(_device_only(), "emulated", mesh_dim_names=("alone",))
    model = fully_shard(_net(), mesh=mesh, offload_policy=CPUOffloadPolicy())
    with _raises("No backend type associated with device type cpu"):
        model.head.weight.full_tensor()


@check
def a_tensor_with_gaps_is_refused() -> None:
    with _raises("ontiguous"):
        dist.all_reduce(_empty(4, 4)[:, :2])


@check
def sizes_that_do_not_fit_the_group_are_refused() -> None:
    with _raises("world_size times input"):
        dist.all_gather_into_tensor(_empty(4 * _world() + 1), _empty(4))
    with _raises("output size times world size"):
        dist.reduce_scatter_tensor(_empty(4), _empty(4 * _world() + 1))


@check
def ranks_that_bring_different_sizes_wait_for_ever() -> None:
    group = dist.new_group()
    numel = _rank() + 1
    work = dist.all_gather_into_tensor(_empty(numel * _world()), _empty(numel), group, async_op=True)
    assert not _completes(work, 0.5)
    later = dist.all_reduce(_empty(1), group=group, async_op=True)
    assert not _completes(later, 0.2)
    with _raises("timed out"):
        work.wait(datetime.timedelta(milliseconds=100))


@check
def ranks_that_do_different_things_wait_for_ever() -> None:
    differences: list[Callable[[Any], dist.Work]] = [
        lambda group: (dist.all_reduce if _rank() == 0 else _broadcast)(_empty(4), group=group, async_op=True),
        lambda group: dist.broadcast(_empty(4), _rank(), group, async_op=True),
        lambda group: dist.all_reduce(_empty(4), _an_operation_of_its_own(), group, async_op=True),
    ]
    for difference in differences:
        assert not _completes(difference(dist.new_group()), 0.3)


def _broadcast(tensor: torch.Tensor, **options: Any) -> Any:
    return dist.broadcast(tensor, 0, **options)


def _an_operation_of_its_own() -> Any:
    return dist.ReduceOp.SUM if _rank() == 0 else dist.ReduceOp.MAX


@check
def a_group_that_is_stuck_leaves_the_others_alone() -> None:
    """The last check: the groups of the checks above are still stuck."""
    tensor = _own().to(_device())
    dist.all_reduce(tensor)
    _same(tensor, _everyone().sum(0))


# The program


@functools.cache
def _control() -> dist.ProcessGroup:
    """What keeps the ranks at the same check. No check but those of groups uses it."""
    return dist.new_group(backend="gloo")


def _report(name: str, error: str) -> None:
    line = json.dumps({"check": name, "rank": _rank(), "error": error[:2000]}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())


def _give_up(name: str, thread: int) -> None:
    place = traceback.format_stack(sys._current_frames()[thread])
    _report(name, f"no end within {SECONDS_FOR_A_CHECK} seconds\n" + "".join(place[-4:]))
    os._exit(1)


def _error_of(name: str) -> str:
    watch = threading.Timer(SECONDS_FOR_A_CHECK, _give_up, (name, threading.get_ident()))
    watch.daemon = True
    watch.start()
    try:
        CHECKS[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_tb(error.__traceback__)[-1]}"
    finally:
        watch.cancel()
    return ""


def main(names: list[str]) -> None:
    import fsdp_doctor.emulated  # noqa: F401, which registers the device

    dist.init_process_group("cpu:gloo,emulated:emulated", timeout=datetime.timedelta(minutes=5))
    torch.get_device_module("emulated").set_device(_rank())
    _control()
    for name in names:
        _report(name, _error_of(name))
        # A rank whose check failed must not meet in the next one those that still wait for it in this one.
        dist.barrier(_control())
    # Groups are stuck, and a thread of gloo that still holds a tensor may abort the interpreter's own exit.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:] or list(CHECKS))
