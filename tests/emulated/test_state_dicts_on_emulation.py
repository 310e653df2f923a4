"""State dicts, checkpoints and DTensor on the emulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.ranks import this_device, this_rank, world_size
from support.training import (
    EVEN,
    STEPS,
    UNEVEN,
    adamw,
    all_ranks,
    assert_all,
    assert_close,
    assert_same,
    fsdp2_of,
    local_of,
    mesh_of_all,
    new_net,
    on_the_device,
    other_net,
    part_of,
    parts_of,
    shards_of,
    shared_directory,
    train,
    trained_on_cpu,
    weights_of,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


@on_the_device
def test_a_state_dict_holds_shards() -> None:
    state = fsdp2_of(new_net(UNEVEN)).state_dict()
    assert {type(value) for value in state.values()} == {DTensor}
    assert {value.placements for value in state.values()} == {(Shard(0),)}
    assert_all(
        assert_same, {name: value.to_local() for name, value in state.items()}, parts_of(weights_of(new_net(UNEVEN)))
    )


@on_the_device
def test_a_full_tensor_is_the_parameter_before_sharding() -> None:
    for dims in (EVEN, UNEVEN):
        model = fsdp2_of(new_net(dims))
        assert_all(
            assert_same, {name: p.full_tensor() for name, p in model.named_parameters()}, weights_of(new_net(dims))
        )


@on_the_device
def test_get_model_state_dict_gives_whole_tensors_to_every_rank() -> None:
    for options in ({}, {"offload_policy": CPUOffloadPolicy()}):
        state = get_model_state_dict(
            fsdp2_of(new_net(UNEVEN), **options), options=StateDictOptions(full_state_dict=True)
        )
        assert_all(assert_same, state, weights_of(new_net(UNEVEN)))


@on_the_device
def test_get_model_state_dict_with_cpu_offload_gives_whole_cpu_tensors_to_rank_0() -> None:
    state = get_model_state_dict(
        fsdp2_of(new_net(UNEVEN)), options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert {tensor.device.type for tensor in state.values()} <= {"cpu"}
    assert_all(assert_same, state, weights_of(new_net(UNEVEN)) if this_rank() == 0 else {})


@on_the_device
def test_get_model_state_dict_with_cpu_offload_gives_cpu_shards() -> None:
    state = get_model_state_dict(fsdp2_of(new_net(UNEVEN)), options=StateDictOptions(cpu_offload=True))
    assert {tensor.device.type for tensor in state.values()} == {"cpu"}
    assert_all(
        assert_same, {name: local_of(tensor) for name, tensor in state.items()}, parts_of(weights_of(new_net(UNEVEN)))
    )


@on_the_device
def test_set_model_state_dict_restores_sharded_and_whole_states() -> None:
    sharded = get_model_state_dict(fsdp2_of(new_net(UNEVEN)))
    whole = new_net(UNEVEN).state_dict()
    for offload in ({}, {"offload_policy": CPUOffloadPolicy()}):
        for state, options in ((sharded, {}), (whole, {"full_state_dict": True})):
            model = fsdp2_of(other_net(UNEVEN), **offload)
            set_model_state_dict(model, state, options=StateDictOptions(**options))
            assert_all(assert_same, shards_of(model), parts_of(weights_of(new_net(UNEVEN))))


def _resumed(options: StateDictOptions, **sharding: Any) -> None:
    """One step, then the states go to another model, which does the rest."""
    first, second = fsdp2_of(new_net(), **sharding), fsdp2_of(other_net(), **sharding)
    optimizer, another = adamw(first), adamw(second)
    train(first, optimizer, steps=[0])
    set_model_state_dict(second, get_model_state_dict(first, options=options), options=options)
    state = get_optimizer_state_dict(first, optimizer, options=options)
    set_optimizer_state_dict(second, another, state, options=options)
    train(second, another, steps=range(1, STEPS))
    assert_all(assert_close, shards_of(second), parts_of(trained_on_cpu()[0]))


@on_the_device
def test_training_resumes_from_sharded_states_as_if_it_had_not_stopped() -> None:
    _resumed(StateDictOptions())


@on_the_device
def test_training_resumes_from_whole_states_as_if_it_had_not_stopped() -> None:
    _resumed(StateDictOptions(full_state_dict=True))


@on_the_device
def test_training_resumes_under_cpu_offload_as_if_it_had_not_stopped() -> None:
    _resumed(StateDictOptions(), offload_policy=CPUOffloadPolicy())


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _saved_and_resumed(save: Callable[[dict[str, Any], str], None], **sharding: Any) -> None:
    first, second = fsdp2_of(new_net(UNEVEN), **sharding), fsdp2_of(other_net(UNEVEN), **sharding)
    optimizer, another = adamw(first), adamw(second)
    train(first, optimizer, steps=[0], vocabulary=UNEVEN.vocabulary)
    with shared_directory() as directory:
        save(_state(first, optimizer), directory)
        state = _state(second, another)
        dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(second, state["model"])
    set_optimizer_state_dict(second, another, state["optimizer"])
    assert_all(assert_same, shards_of(second), {name: shard.cpu() for name, shard in shards_of(first).items()})
    train(second, another, steps=range(1, STEPS), vocabulary=UNEVEN.vocabulary)
    assert_all(assert_close, shards_of(second), parts_of(trained_on_cpu(UNEVEN)[0]))


@on_the_device
def test_training_resumes_from_a_distributed_checkpoint_as_if_it_had_not_stopped() -> None:
    _saved_and_resumed(lambda state, directory: dcp.save(state, checkpoint_id=directory))


@on_the_device
def test_training_resumes_from_a_distributed_checkpoint_under_cpu_offload() -> None:
    policy = CPUOffloadPolicy()
    _saved_and_resumed(lambda state, directory: dcp.save(state, checkpoint_id=directory), offload_policy=policy)


@on_the_device
def test_training_resumes_from_a_distributed_checkpoint_that_was_saved_in_the_background() -> None:
    _saved_and_resumed(lambda state, directory: dcp.async_save(state, checkpoint_id=directory).result())


# DTensor


def _whole() -> torch.Tensor:
    return torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)


@on_the_device
def test_distribute_tensor_deals_out_what_rank_0_has() -> None:
    own = _whole() if this_rank() == 0 else torch.zeros(7, 5)
    for placement, expected in (
        (Shard(0), part_of(_whole(), 0)),
        (Shard(1), part_of(_whole(), 1)),
        (Replicate(), _whole()),
    ):
        assert_same(distribute_tensor(own.to(this_device()), mesh_of_all(), [placement]).to_local(), expected)


@on_the_device
def test_redistribute_gives_what_each_placement_says() -> None:
    placements = {Shard(0): part_of(_whole(), 0), Shard(1): part_of(_whole(), 1), Replicate(): _whole()}
    for before in placements:
        distributed = distribute_tensor(_whole().to(this_device()), mesh_of_all(), [before])
        for after, expected in placements.items():
            assert_same(distributed.redistribute(placements=[after]).to_local(), expected)


@on_the_device
def test_redistribute_adds_up_partial_values() -> None:
    mine = (_whole() * (this_rank() + 1)).to(this_device())
    total = _whole() * sum(rank + 1 for rank in all_ranks())
    for operation, expected in (("sum", total), ("max", _whole() * world_size()), ("avg", total / world_size())):
        partial = DTensor.from_local(mine, mesh_of_all(), [Partial(operation)])
        assert_close(partial.redistribute(placements=[Replicate()]).to_local(), expected)
        if operation != "max":
            assert_close(partial.redistribute(placements=[Shard(0)]).to_local(), part_of(expected))


@on_the_device
def test_a_dtensor_product_is_the_product_and_so_is_its_gradient() -> None:
    left, right = _whole() / 35, _whole().t().contiguous() / 35
    a = distribute_tensor(left.to(this_device()), mesh_of_all(), [Shard(1)]).requires_grad_()
    b = distribute_tensor(right.to(this_device()), mesh_of_all(), [Shard(0)]).requires_grad_()
    (a @ b).redistribute(placements=[Replicate()]).square().sum().backward()
    left.requires_grad_()
    right.requires_grad_()
    (left @ right).square().sum().backward()
    assert_close(a.grad.full_tensor(), left.grad)
    assert_close(b.grad.full_tensor(), right.grad)
