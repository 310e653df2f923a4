"""A model that changes between two calls: the second yields what it is then, from a plan of its own where it must."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.extraction import (
    EVEN,
    INTEGERS,
    Tensors,
    adapted,
    all_trainable,
    assert_same,
    cast_of,
    everywhere,
    extracted,
    fsdp1,
    fsdp2,
    mesh_over,
    new_net,
    on_the_device,
    plan_for,
    shard_qwen2,
    sharded_net,
    tensors_of,
    train_step,
)
from support.ranks import Setting, accelerator, device_type, on_ranks, this_device, this_rank, world_size
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from fsdp_doctor import full_tensors, weights_info

DEFAULTS: dict[str, Any] = {}


# What needs no second plan


@on_the_device
def test_the_plan_is_kept_while_training_changes_values_only() -> None:
    for build in (lambda net: fsdp2(net), lambda net: fsdp1(net)):
        model = build(new_net(empty=False))
        train_step(model)
        extracted(model)
        first = plan_for(model)
        before = extracted(model)
        train_step(model, seed=1)
        next(iter(model.parameters())).requires_grad_(False)
        after = extracted(model)
        assert plan_for(model) is first
        assert not torch.equal(before["layers.0.up.weight"], after["layers.0.up.weight"])
        assert_same(after, extracted(model, bucket_bytes=1 << 20))  # by a plan that is made now


@on_the_device
def test_a_plan_keeps_neither_the_model_nor_its_device_memory() -> None:
    model = fsdp2(new_net())
    extracted(model)
    gc.collect()
    there = weakref.ref(model)
    before = accelerator().memory_allocated()
    nbytes = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    model.to("cpu")
    gc.collect()
    assert accelerator().memory_allocated() <= before - nbytes
    del model
    gc.collect()
    assert there() is None


# What does


CHANGES = (
    *("replace parameter", "replicate", "cast parameter", "untie", "replace buffer", "make buffer transient"),
    *("add module", "remove module", "rename module"),
)


def _change(model: Any, change: str) -> None:
    weight = model.large.weight
    match change:
        case "replace parameter":
            model.large.weight = _like(weight, weight.to_local() + 1)
        case "replicate":
            whole = weight.full_tensor().detach()
            model.large.weight = nn.Parameter(DTensor.from_local(whole, mesh_over(), [Replicate()]))
        case "cast parameter":
            model.large.weight = _like(weight, weight.to_local().to(torch.bfloat16))
        case "untie":
            model.head.weight = _like(model.head.weight, model.head.weight.to_local() * 2)
        case "replace buffer":
            model.table = torch.arange(20, device=this_device()).view(4, 5)
        case "make buffer transient":
            scale = model.scale
            del model.scale
            model.register_buffer("scale", scale, persistent=False)
        case "add module":
            torch.manual_seed(3)
            model.extra = nn.Linear(4, 6).to(this_device())
        case "remove module":
            del model.large
        case "rename module":
            model.big = model.large
            del model.large
        case _:
            raise AssertionError(change)


def _like(old: Any, local: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(local, old.device_mesh, old.placements))


@on_the_device
def test_a_change_of_the_model_is_in_the_next_call() -> None:
    """Equals what a model yields that was changed before its first call."""
    for change in CHANGES:
        model, other = fsdp2(new_net(**EVEN)), fsdp2(new_net(**EVEN))
        before = extracted(model)
        _change(model, change)
        _change(other, change)
        after = extracted(model)
        assert_same(after, extracted(other))
        assert list(after) == list(weights_info(model)), change
        assert (change == "replicate") == _are_same(before, after), change


def _are_same(before: Tensors, after: Tensors) -> bool:
    return list(before) == list(after) and all(
        after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in before.items()
    )


@on_the_device
def test_a_model_that_is_sharded_after_its_first_call_is_gathered() -> None:
    net = new_net().to(this_device())
    expected = tensors_of(net)
    assert_same(extracted(net), expected)
    assert_same(extracted(fsdp2(net)), expected)


@on_ranks(Setting("cpu", 4))
def test_a_model_whose_parameters_come_from_another_mesh_is_gathered() -> None:
    model, other = (nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8)) for _ in range(2))
    other.load_state_dict(model.state_dict())
    expected = tensors_of(model)
    fully_shard(model, mesh=mesh_over())
    fully_shard(other, mesh=mesh_over(2, 2))
    assert_same(extracted(model), expected)
    for own, placed in zip(model, other, strict=True):
        own.weight, own.bias = placed.weight, placed.bias
    assert_same(extracted(model), expected)


@on_the_device
def test_a_model_moved_between_calls_is_gathered_from_its_new_place() -> None:
    for build in (
        lambda: fsdp2(new_net()),
        lambda: fsdp2(new_net(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    ):
        model = build()
        expected = extracted(model)
        for device in ("cpu", this_device(), "cpu"):
            model.to(device)
            assert_same(extracted(model), expected)


@on_the_device
def test_an_fsdp1_unit_moved_between_calls_is_gathered_from_its_new_place() -> None:
    from fsdp_doctor.weights.fsdp import private, reader

    for use_orig_params in (True, False):
        net = new_net(empty=False)
        model = fsdp1(net if use_orig_params else all_trainable(net), use_orig_params=use_orig_params)
        private.run_fsdp1_lazy_init(model)
        expected = extracted(model)
        for device in (torch.device("cpu"), this_device()):
            for unit in reader.read(model).fsdp1_units:
                unit.move_to(device, non_blocking=False)
            assert_same(extracted(model), expected)


@on_the_device
def test_a_forward_without_a_backward_between_calls_changes_nothing_that_is_yielded() -> None:
    model, expected = sharded_net()
    for _ in range(2):
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long, device=this_device()))
        assert_same(extracted(model), expected)


@on_the_device
def test_each_calls_own_arguments_are_kept_apart() -> None:
    model, expected = sharded_net()
    half = {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}
    for _ in range(2):
        assert_same(extracted(model, **half), cast_of(expected, torch.bfloat16))
        assert_same(extracted(model), expected)
        assert_same(
            extracted(model, **{**half, "keep_dtype": [*INTEGERS, "scale"]}), cast_of(expected, torch.bfloat16, "scale")
        )
        for nbytes in (4096, 8192, 16384, 32768, 65536):
            assert_same(extracted(model, bucket_bytes=nbytes), expected)


@on_the_device
def test_adapters_that_are_added_switched_or_disabled_between_calls_are_noticed() -> None:
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = shard_qwen2(adapted())
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    merged, base = extracted(model), extracted(model, lora="base")
    torch.manual_seed(2)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    bucket_bytes = itertools.count(1 << 20)
    for change, expected in (
        (lambda: model.set_adapter("second"), None),
        (lambda: [layer.enable_adapters(False) for layer in layers], base),
        (lambda: [layer.enable_adapters(True) for layer in layers], None),
        (lambda: model.set_adapter("default"), merged),
        (lambda: [layer.scaling.update(default=0.0) for layer in layers], base),
    ):
        change()
        found = extracted(model)
        assert_same(found, expected or extracted(model, bucket_bytes=next(bucket_bytes)))  # by a plan that is made now
        assert expected or not _are_same(found, merged)


@everywhere
def test_a_model_sharded_over_another_group_of_the_same_ranks_is_replanned() -> None:
    """Covers meshes that torch says are equal."""
    every = list(range(world_size()))
    mesh = DeviceMesh.from_group(dist.new_group(every), device_type(), every, mesh_dim_names=mesh_over().mesh_dim_names)
    assert mesh == mesh_over()
    model = fsdp2(new_net(**EVEN))
    expected, first = extracted(model), plan_for(model)
    for parameter in model.parameters():
        # A parameter made of a DTensor over the new mesh has the old one: torch keeps what it knows of an equal mesh.
        parameter._spec = dataclasses.replace(parameter._spec, mesh=mesh)
    assert_same(extracted(model), expected)
    groups = {source.shard_group.group for source in plan_for(model).sources if hasattr(source, "shard_group")}
    assert plan_for(model) is not first
    assert groups == {mesh.get_group()}


@everywhere
def test_an_fsdp1_unit_over_another_group_of_the_same_ranks_is_replanned() -> None:
    model = fsdp1(new_net(empty=False))
    expected, first = extracted(model), plan_for(model)
    model._handle.process_group = dist.new_group(list(range(world_size())))
    assert plan_for(model) is not first
    assert_same(extracted(model), expected)


@on_the_device
def test_the_plan_that_was_not_used_for_the_longest_is_dropped_first() -> None:
    net = nn.Linear(2, 2)
    made = [plan_for(net, nbytes) for nbytes in range(1, 5)]
    assert plan_for(net, 1) is made[0]
    plan_for(net, 5)
    assert plan_for(net, 1) is made[0]
    assert plan_for(net, 2) is not made[1]


# Calls that overlap


@everywhere
def test_two_calls_that_are_read_in_turns_yield_what_one_does() -> None:
    model, expected = sharded_net()
    for options in (DEFAULTS, {"bucket_bytes": 4096}):
        pairs = list(zip(full_tensors(model, **options), full_tensors(model, **options), strict=True))
        for own in (dict(one for one, _ in pairs), dict(other for _, other in pairs)):
            assert_same(own, expected)


@everywhere
def test_a_call_inside_of_another_yields_what_it_does_alone() -> None:
    model, expected = sharded_net()
    outer = {}
    for index, (name, tensor) in enumerate(full_tensors(model, bucket_bytes=4096)):
        outer[name] = tensor
        if index % 5 == 1:
            assert_same(extracted(model, bucket_bytes=8192), expected)
    assert_same(outer, expected)


@on_the_device
def test_a_copy_of_a_model_has_a_plan_of_its_own() -> None:
    net = new_net().to(this_device())
    extracted(net)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin.large.weight.fill_(this_rank())
    assert extracted(twin)["large.weight"].eq(this_rank()).all()
    assert not extracted(net)["large.weight"].eq(this_rank()).all()
