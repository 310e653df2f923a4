"""Full tensors into FSDP1 models, whose shards are ranges of flat parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from support.extraction import (
    Tensors,
    all_trainable,
    assert_same,
    extracted,
    fsdp1,
    mesh_over,
    new_net,
    on_the_device,
    raises_soon,
    train_step,
)
from support.loading import BUCKET_BYTES, items_of, on_first, other_tensors, reusing
from support.ranks import Setting, on_ranks, this_device
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from fsdp_doctor import LoadError, load_full_tensors
from fsdp_doctor.case.offloading import offload
from fsdp_doctor.fsdp import reader

_NO_EMPTY = {"empty": False}


def _new(*, use_orig_params: bool = True, **options: Any) -> nn.Module:
    net = new_net(**_NO_EMPTY)
    return fsdp1(net if use_orig_params else all_trainable(net), use_orig_params=use_orig_params, **options)


def _trained(**options: Any) -> nn.Module:
    model = _new(**options)
    train_step(model)
    return model


def _by_hand(*, non_blocking: bool, **options: Any) -> nn.Module:
    model = _trained(**options)
    offload(model, non_blocking=non_blocking)
    return model


STATES: dict[str, Callable[..., nn.Module]] = {
    "new": _new,
    "trained": _trained,
    "by hand": lambda **options: _by_hand(non_blocking=False, **options),
    "left in flight": lambda **options: _by_hand(non_blocking=True, **options),
    "offloaded": lambda **options: _new(cpu_offload=CPUOffload(offload_params=True), **options),
    "offloaded, trained": lambda **options: _trained(cpu_offload=CPUOffload(offload_params=True), **options),
    "mixed precision": lambda **options: _new(mixed_precision=MixedPrecision(torch.bfloat16), **options),
    "not sharded": lambda **options: _new(sharding_strategy=ShardingStrategy.NO_SHARD, **options),
}


def _shards(model: nn.Module) -> list[tuple[torch.device, bool, int]]:
    units = reader.read(model).fsdp1_units
    return [(unit.shard.device, unit.shard.is_pinned(), unit.shard.data_ptr()) for unit in units]


def _assert_loads(model: nn.Module, source: Any, expected: Tensors) -> None:
    before = _shards(model)
    load_full_tensors(model, source(expected), bucket_bytes=BUCKET_BYTES)
    assert _shards(model) == before
    assert_same(extracted(model), expected)


@on_the_device
def test_flat_shards_are_filled_where_they_lie() -> None:
    sources = itertools.cycle((on_first, items_of, lambda tensors: on_first(reusing(tensors, "emulated"))))
    for (state, original), source in zip(itertools.product(STATES, (True, False)), sources, strict=False):
        _assert_loads(STATES[state](use_orig_params=original), source, other_tensors(**_NO_EMPTY))


@on_the_device
def test_what_a_forward_left_unsharded_is_not_used_again() -> None:
    tokens = torch.arange(6).view(2, 3).to(this_device())
    for options in ({}, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}):
        model, fresh = _new(**options), _new(**options)
        with torch.no_grad():
            model(tokens)
        for one in (model, fresh):
            load_full_tensors(one, other_tensors(**_NO_EMPTY))
        with torch.no_grad():
            assert torch.equal(model(tokens), fresh(tokens))


@on_the_device
def test_a_model_that_was_loaded_trains_as_one_that_had_the_weights_from_the_start() -> None:
    for original in (True, False):
        net = new_net(**_NO_EMPTY)
        net.load_state_dict(other_tensors(**_NO_EMPTY))
        fresh = fsdp1(net if original else all_trainable(net), use_orig_params=original)
        model = _new(use_orig_params=original)
        load_full_tensors(model, on_first(other_tensors(**_NO_EMPTY)))
        assert train_step(model) == train_step(fresh)
        assert_same(extracted(model), extracted(fresh))


@on_the_device
def test_a_parameter_with_strides_of_its_own_is_filled() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)

    expected = {
        name: torch.randn_like(t, memory_format=torch.contiguous_format) for name, t in net().state_dict().items()
    }
    for source in (lambda tensors: tensors, items_of):
        model = FullyShardedDataParallel(net(), device_id=this_device(), use_orig_params=True)
        load_full_tensors(model, source(expected))
        assert_same(extracted(model), expected)


@on_the_device
def test_inside_of_summon_full_params_nothing_is_loaded() -> None:
    model = _new()
    with (
        FullyShardedDataParallel.summon_full_params(model),
        raises_soon(LoadError, "summon_full_params", "written nothing"),
    ):
        load_full_tensors(model, other_tensors(**_NO_EMPTY))


@on_ranks(Setting("emulated", 4))
def test_every_replica_under_hybrid_sharding_is_filled() -> None:
    for original, source in itertools.product((True, False), (on_first, items_of)):
        options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh_over(2, 2)}
        model = _new(use_orig_params=original, **options)
        _assert_loads(model, source, other_tensors(**_NO_EMPTY))


@on_ranks(Setting("emulated", 1))
def test_a_shard_group_of_one_is_filled() -> None:
    for original in (True, False):
        _assert_loads(_new(use_orig_params=original), items_of, other_tensors(**_NO_EMPTY))
