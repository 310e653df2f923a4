"""FSDP2 on the emulated device, against the same model on the CPU in one process."""

from __future__ import annotations

import copy
import functools
import itertools

import torch
import torch.distributed as dist
from support.ranks import this_device, this_rank, world_size
from support.training import (
    EVEN,
    STEPS,
    UNEVEN,
    Dims,
    Net,
    adamw,
    all_ranks,
    allocated_bytes,
    assert_all,
    assert_close,
    assert_same,
    backward,
    check_training,
    fsdp2_of,
    gradient_shards_of,
    gradients_on_cpu,
    loss_of,
    new_net,
    on_the_device,
    part_of,
    parts_of,
    shards_of,
    tokens_of,
    train,
    trained_on_cpu,
    weights_of,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard


@on_the_device
def test_fsdp2_trains_as_one_process_does() -> None:
    check_training(fsdp2_of(new_net(), reshard_after_forward=True))


@on_the_device
def test_fsdp2_without_resharding_trains_as_one_process_does() -> None:
    check_training(fsdp2_of(new_net(), reshard_after_forward=False))


@on_the_device
def test_fsdp2_with_uneven_shards_trains_as_one_process_does() -> None:
    check_training(fsdp2_of(new_net(UNEVEN)), UNEVEN)


@on_the_device
def test_fsdp2_with_explicit_prefetching_trains_as_one_process_does() -> None:
    model = fsdp2_of(new_net())
    units = list(model.blocks)
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    check_training(model)


@on_the_device
def test_fsdp2_with_activation_checkpointing_trains_as_one_process_does() -> None:
    check_training(fsdp2_of(new_net(checkpointed=True)))


@on_the_device
def test_fsdp2_sharded_on_dimension_1_trains_as_one_process_does() -> None:
    model = fsdp2_of(new_net(), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    train(model, adamw(model))
    assert_all(
        assert_close,
        shards_of(model),
        {name: part_of(tensor, tensor.ndim - 1) for name, tensor in trained_on_cpu()[0].items()},
    )


@on_the_device
def test_fsdp2_on_a_mesh_of_replicas_trains_as_one_process_does() -> None:
    mesh = init_device_mesh("emulated", (world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(new_net(), mesh=mesh)
    train(model, adamw(model))
    assert_all(assert_close, shards_of(model), trained_on_cpu()[0])


@on_the_device
def test_fsdp2_with_pinned_cpu_offload_trains_as_one_process_does() -> None:
    check_training(fsdp2_of(new_net(UNEVEN), offload_policy=CPUOffloadPolicy(pin_memory=True)), UNEVEN)


@on_the_device
def test_fsdp2_with_pageable_cpu_offload_trains_as_one_process_does() -> None:
    check_training(fsdp2_of(new_net(UNEVEN), offload_policy=CPUOffloadPolicy(pin_memory=False)), UNEVEN)


@on_the_device
def test_fsdp2_keeps_offloaded_shards_and_gradients_on_the_cpu_and_pinned_if_told_so() -> None:
    for pinned in (True, False):
        model = fsdp2_of(new_net(), offload_policy=CPUOffloadPolicy(pin_memory=pinned))
        backward(model, 0, [this_rank()], this_device())
        shards = [*shards_of(model).values(), *gradient_shards_of(model).values()]
        assert {shard.device.type for shard in shards} == {"cpu"}
        assert {shard.is_pinned() for shard in shards_of(model).values()} == {pinned}


@on_the_device
def test_fsdp2_gradients_are_those_of_one_process() -> None:
    """Of two ranks to the last bit: their sum has one order only, and halves are exact."""
    for dims in (EVEN, UNEVEN):
        model = fsdp2_of(new_net(dims))
        backward(model, 0, [this_rank()], this_device(), dims.vocabulary)
        assert_all(
            assert_same if world_size() == 2 else assert_close,
            gradient_shards_of(model),
            parts_of(gradients_on_cpu(dims)),
        )


def _mixed_precision_step(net: Net, step: int) -> None:
    """Computes in bfloat16, adds up the ranks' gradients in float32: what MixedPrecisionPolicy says."""
    for rank in all_ranks():
        low = copy.deepcopy(net).bfloat16()
        low.zero_grad()
        loss_of(low, tokens_of(step, rank, EVEN.vocabulary)).backward()
        for parameter, its_low in zip(net.parameters(), low.parameters(), strict=True):
            gradient = its_low.grad.float() / world_size()
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@on_the_device
def test_fsdp2_mixed_precision_trains_as_bfloat16_with_float32_sums_does() -> None:
    net, model = new_net(), fsdp2_of(new_net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer, its_optimizer = adamw(net), adamw(model)
    for step in range(STEPS):
        _mixed_precision_step(net, step)
        optimizer.step()
        optimizer.zero_grad()
        train(model, its_optimizer, steps=[step])
    assert_all(functools.partial(assert_close, atol=2e-3), shards_of(model), parts_of(weights_of(net)))
    moved = (net.head.weight - new_net().head.weight).abs().max()
    assert moved > 0.01, f"weights that move by {moved} cannot tell right from wrong"


@on_the_device
def test_fsdp2_computes_in_the_dtype_of_its_policy_and_keeps_shards_in_float32() -> None:
    model = fsdp2_of(new_net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    with torch.no_grad():
        output = model(tokens_of(0, 0, EVEN.vocabulary).to(this_device()))
    model.reshard()
    assert output.dtype == torch.bfloat16
    assert {shard.dtype for shard in shards_of(model).values()} == {torch.float32}


@on_the_device
def test_fsdp2_clips_by_the_norm_of_the_whole_gradient() -> None:
    expected = torch.stack([gradient.norm() for gradient in gradients_on_cpu(UNEVEN).values()]).norm()
    limit = float(expected) / 4
    for options in ({}, {"offload_policy": CPUOffloadPolicy()}):
        model = fsdp2_of(new_net(UNEVEN), **options)
        backward(model, 0, [this_rank()], this_device(), UNEVEN.vocabulary)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        assert_close(norm.full_tensor(), expected, atol=0)
        clipped = {name: gradient / 4 for name, gradient in gradients_on_cpu(UNEVEN).items()}
        assert_all(functools.partial(assert_close, atol=1e-6), gradient_shards_of(model), parts_of(clipped))


@on_the_device
def test_fsdp2_accumulates_gradients_without_communication_until_it_is_told_to_sync() -> None:
    model = fsdp2_of(new_net())
    model.set_requires_gradient_sync(False)
    for step in range(2):
        backward(model, step, [this_rank()], this_device())
        assert all(parameter.grad is None for parameter in model.parameters() if isinstance(parameter, DTensor))
    model.set_requires_gradient_sync(True)
    backward(model, 2, [this_rank()], this_device())
    assert_all(assert_close, gradient_shards_of(model), parts_of(gradients_on_cpu(steps=3)))


@on_the_device
def test_fsdp2_divides_gradients_by_the_factor_it_is_told() -> None:
    """A reduction with PREMUL_SUM inside."""
    model = fsdp2_of(new_net())
    for unit in (*model.blocks, model):
        unit.set_gradient_divide_factor(4 * world_size())
    backward(model, 0, [this_rank()], this_device())
    expected = {name: gradient / 4 for name, gradient in gradients_on_cpu().items()}
    assert_all(functools.partial(assert_close, atol=1e-6), gradient_shards_of(model), parts_of(expected))


@on_the_device
def test_fsdp2_unshards_by_hand_to_whole_parameters_and_frees_their_memory_again() -> None:
    model = fsdp2_of(new_net(UNEVEN))
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    expected = weights_of(new_net(UNEVEN))
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    before, unsharded, resharded = allocated_bytes(), [], []
    for _ in range(2):
        for unit in units:
            unit.unshard()
        assert_all(assert_same, weights_of(model), expected)
        unsharded.append(allocated_bytes())
        for unit in units:
            unit.reshard()
        resharded.append(allocated_bytes())
    assert min(unsharded) >= before + nbytes
    assert resharded == [before, before]
    assert_all(assert_same, shards_of(model), parts_of(expected))


@on_the_device
def test_fsdp2_unshards_asynchronously() -> None:
    model = fsdp2_of(new_net())
    handles = [unit.unshard(async_op=True) for unit in (*model.blocks, model)]
    for handle in handles:
        handle.wait()
    assert_all(assert_same, weights_of(model), weights_of(new_net()))


@on_the_device
def test_fsdp2_uses_no_more_memory_after_many_steps_than_after_one() -> None:
    allocated: dict[str, list[int]] = {}
    for name, policy in (("device", OffloadPolicy()), ("cpu", CPUOffloadPolicy())):
        model = fsdp2_of(new_net(), offload_policy=policy)
        optimizer = adamw(model)
        for step in range(4):
            train(model, optimizer, steps=[step])
            allocated.setdefault(name, []).append(allocated_bytes())
    assert [len(set(after_each[1:])) for after_each in allocated.values()] == [1, 1], allocated


@on_the_device
def test_fsdp2_holds_fewer_parameters_at_a_time_where_it_reshards_after_forward() -> None:
    peaks = {}
    for reshards in (True, False):
        model = fsdp2_of(new_net(Dims(vocabulary=6, width=120, hidden=240)), reshard_after_forward=reshards)
        before = allocated_bytes()
        torch.get_device_module("emulated").reset_peak_memory_stats()
        with torch.no_grad():
            model(tokens_of(0, 0, 6).to(this_device()))
        peaks[reshards] = torch.get_device_module("emulated").max_memory_allocated() - before
    assert peaks[True] < 0.8 * peaks[False], peaks


@on_the_device
def test_fsdp2_moves_to_the_cpu_and_back_by_hand_and_trains_on() -> None:
    for non_blocking in (True, False):
        model = fsdp2_of(new_net())
        optimizer = adamw(model)
        train(model, optimizer, steps=[0])
        model.to("cpu", non_blocking=non_blocking)
        assert {shard.device.type for shard in shards_of(model).values()} == {"cpu"}
        model.to(this_device(), non_blocking=non_blocking)
        train(model, optimizer, steps=range(1, STEPS))
        assert_all(assert_close, shards_of(model), parts_of(trained_on_cpu()[0]))


@on_the_device
def test_checkpointed_blocks_draw_the_same_dropout_again_in_backward() -> None:
    gradients = []
    for checkpointed in (False, True):
        model = fsdp2_of(new_net(checkpointed=checkpointed, dropout=0.5))
        torch.manual_seed(7)
        backward(model, 0, [this_rank()], this_device())
        gradients.append({name: shard.cpu() for name, shard in gradient_shards_of(model).items()})
    assert_all(assert_same, gradients[1], gradients[0])
    assert not torch.equal(gradients[0]["head.weight"], part_of(gradients_on_cpu()["head.weight"]))


@on_the_device
def test_a_model_made_on_meta_is_materialized_and_loaded_and_trains_as_one_process_does() -> None:
    with torch.device("meta"):
        net = Net(EVEN)
    model = fsdp2_of(net)
    model.to_empty(device=this_device())
    whole = new_net().state_dict() if this_rank() == 0 else {}
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    check_training(model)


@on_the_device
def test_a_model_made_on_meta_is_initialized_in_place_and_all_ranks_agree_on_it() -> None:
    with torch.device("meta"):
        net = Net(EVEN)
    model = fsdp2_of(net)
    model.to_empty(device=this_device())
    torch.manual_seed(3)
    nn.init.normal_(model.head.weight)
    whole = model.head.weight.full_tensor()
    everyone = [torch.empty_like(whole) for _ in all_ranks()]
    dist.all_gather(everyone, whole)
    for others in everyone:
        assert_same(others, whole.cpu())
    assert 0.5 < whole.std().item() < 1.5
    assert whole.flatten().unique().numel() == whole.numel(), "two shards drew the same numbers"
