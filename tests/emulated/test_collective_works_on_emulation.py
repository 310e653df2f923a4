"""When collectives of the emulated device are complete, which groups they concern, and what is refused."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.collectives import completes, input_of, inputs_of_all, unfilled
from support.ranks import Setting, control, on_ranks, this_device, this_rank, world_size
from support.training import (
    all_ranks,
    allocated_bytes,
    assert_close,
    assert_same,
    group_of_the_device_alone,
    mesh_of_all,
    new_net,
    on_the_device,
    part_of,
    raises_saying,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    fully_shard,
)


@on_the_device
def test_a_barrier_holds_everyone_until_the_last_has_come() -> None:
    for group in (None, group_of_the_device_alone()):
        last = world_size() - 1
        arrived = torch.zeros(1, dtype=torch.float64)
        dist.barrier(group)
        if this_rank() == last:
            time.sleep(0.3)
            arrived += time.time()
        dist.barrier(group)
        left = time.time()
        dist.broadcast(arrived, last)
        assert left >= float(arrived), f"a rank left {float(arrived) - left} seconds before the last one came"


@on_the_device
def test_objects_are_passed_in_groups_with_and_without_a_cpu_backend() -> None:
    for group in (None, group_of_the_device_alone()):
        everyone: list[Any] = [None] * world_size()
        dist.all_gather_object(everyone, {"rank": this_rank()}, group)
        assert everyone == [{"rank": rank} for rank in all_ranks()]
        told = ["from", this_rank()]
        dist.broadcast_object_list(told, 1, group)
        assert told == ["from", 1]
        gathered = [None] * world_size() if this_rank() == 0 else None
        dist.gather_object(this_rank(), gathered, 0, group)
        assert gathered == (list(all_ranks()) if this_rank() == 0 else None)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"for {rank}" for rank in all_ranks()], 0, group)
        assert mine == [f"for {this_rank()}"]


@on_the_device
def test_asynchronous_work_is_complete_when_all_ranks_have_come() -> None:
    dist.barrier()
    tensor = input_of().to(this_device())
    if this_rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert not completes(work, 0.2)
        dist.barrier(control())
    else:
        dist.barrier(control())
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert_same(tensor, inputs_of_all().sum(0))


@on_the_device
def test_the_future_of_a_work_holds_its_outputs() -> None:
    tensor = input_of().to(this_device())
    doubled = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert_same(doubled.wait(), 2 * inputs_of_all().sum(0))


@on_the_device
def test_works_complete_in_any_order_of_waiting() -> None:
    tensors = [(input_of() + index).to(this_device()) for index in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for index in reversed(range(20)):
        works[index].wait()
        assert_same(tensors[index], (inputs_of_all() + index).sum(0))


@on_the_device
def test_coalesced_collectives_are_complete_when_the_manager_is() -> None:
    """The first tensor takes longer than the second, so it is the one that may not be there yet."""
    ones = [torch.ones(numel, device=this_device()) for numel in (1_000_000, 4)]
    with dist._coalescing_manager(async_ops=True) as reductions:
        for tensor in ones:
            dist.all_reduce(tensor)
    reductions.wait()
    whole = [unfilled(tensor.numel() * world_size()) for tensor in ones]
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
        assert_same(tensor, torch.full_like(tensor, world_size()))
    for tensor in scattered:
        assert_same(tensor, torch.full_like(tensor, world_size() ** 2))


@on_the_device
def test_a_coalescing_manager_takes_a_device() -> None:
    group, tensors = dist.new_group(), [input_of().to(this_device()), -input_of().to(this_device())]
    with dist._coalescing_manager(group, device=this_device()):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    assert_same(torch.stack(tensors), torch.stack([inputs_of_all().sum(0), -inputs_of_all().sum(0)]))


@on_the_device
def test_works_of_one_group_complete_in_the_order_of_their_calls() -> None:
    """A group of NCCL has one stream, so who waits for the last has waited for all."""
    tensors = [torch.ones(numel, device=this_device()) for numel in (1_000_000, 1)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[-1].wait()
    assert works[0].is_completed()
    assert_same(tensors[0], torch.full((1_000_000,), float(world_size())))


@on_the_device
def test_what_a_collective_was_given_is_counted_off_when_it_is_freed() -> None:
    before, after = allocated_bytes(), []
    for _ in range(50):
        dist.all_reduce(unfilled(1000))
        dist.all_gather_into_tensor(unfilled(1000 * world_size()), unfilled(1000))
        after.append(torch.get_device_module("emulated").memory_allocated())
    assert after == [before] * 50, f"{before} before, {sorted(set(after))} after"


@on_the_device
def test_functional_collectives_give_what_they_say() -> None:
    own, wide = input_of().to(this_device()), input_of(numel=2 * world_size()).to(this_device())
    assert_same(funcol.all_reduce(own, "avg", mesh_of_all()), inputs_of_all().sum(0) / world_size())
    assert_same(funcol.all_gather_tensor(own, 0, mesh_of_all()), inputs_of_all().flatten())
    assert_same(
        funcol.reduce_scatter_tensor(wide, "sum", 0, mesh_of_all()),
        part_of(inputs_of_all(numel=2 * world_size()).sum(0)),
    )
    exchanged = torch.cat([part_of(input_of(rank, 2 * world_size())) for rank in all_ranks()])
    assert_same(funcol.all_to_all_single(wide, None, None, mesh_of_all()), exchanged)
    assert_same(funcol.broadcast(own, 1, mesh_of_all()), input_of(1))
    many = funcol.all_gather_into_tensor_coalesced([own, own + 1], dist.group.WORLD)
    assert_same(torch.stack(list(many)), torch.stack([inputs_of_all().flatten(), inputs_of_all().flatten() + 1]))
    assert_same(own, input_of())


@on_the_device
def test_a_group_of_some_ranks_leaves_the_others_out() -> None:
    members = [0, world_size() - 1]
    group = dist.new_group(members)
    tensor = input_of().to(this_device())
    if this_rank() in members:
        dist.all_reduce(tensor, group=group)
    assert_same(tensor, input_of(0) + input_of(world_size() - 1) if this_rank() in members else input_of())
    alone, _ = dist.new_subgroups(1)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=alone)
    assert_same(tensor, input_of(0) + input_of(world_size() - 1) if this_rank() in members else input_of())


@on_the_device
def test_groups_that_ranks_use_in_different_order_do_not_wait_for_each_other() -> None:
    groups = [dist.new_group(), dist.new_group()]
    order = (0, 1) if this_rank() % 2 == 0 else (1, 0)
    tensors = [input_of().to(this_device()), -input_of().to(this_device())]
    for _ in range(10):
        works = [dist.all_reduce(tensors[index], dist.ReduceOp.AVG, groups[index], async_op=True) for index in order]
        for work in works:
            work.wait()
    assert_close(tensors[0], inputs_of_all().mean(0))
    assert_close(tensors[1], -inputs_of_all().mean(0))


@on_the_device
def test_a_collective_sees_the_copies_that_its_stream_holds() -> None:
    for stream in (None, torch.Stream(this_device())):
        with torch.get_device_module("emulated").stream(stream):
            tensor = unfilled(4)
            tensor.copy_(input_of().pin_memory(), non_blocking=True)
            dist.all_reduce(tensor)
            assert_same(tensor, inputs_of_all().sum(0))


# Refusals

leaves_groups_stuck = on_ranks(Setting("emulated", 2), Setting("emulated", 3), last_of_its_ranks=True)


@on_the_device
def test_a_group_of_the_device_alone_refuses_cpu_tensors() -> None:
    with raises_saying("No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=group_of_the_device_alone())


@on_the_device
def test_a_group_of_the_cpu_alone_refuses_tensors_of_the_device() -> None:
    with raises_saying("No backend type associated with device type emulated"):
        dist.all_reduce(unfilled(1), group=dist.new_group(backend="cpu:gloo"))


@on_the_device
def test_a_full_tensor_of_offloaded_shards_is_refused_without_a_cpu_backend() -> None:
    mesh = DeviceMesh.from_group(group_of_the_device_alone(), "emulated", mesh_dim_names=("alone",))
    model = fully_shard(new_net(), mesh=mesh, offload_policy=CPUOffloadPolicy())
    with raises_saying("No backend type associated with device type cpu"):
        model.head.weight.full_tensor()


@on_the_device
def test_a_tensor_with_gaps_is_refused() -> None:
    with raises_saying("ontiguous"):
        dist.all_reduce(unfilled(4, 4)[:, :2])


@on_the_device
def test_sizes_that_do_not_fit_the_group_are_refused() -> None:
    with raises_saying("world_size times input"):
        dist.all_gather_into_tensor(unfilled(4 * world_size() + 1), unfilled(4))
    with raises_saying("output size times world size"):
        dist.reduce_scatter_tensor(unfilled(4), unfilled(4 * world_size() + 1))


@leaves_groups_stuck
def test_ranks_that_bring_different_sizes_wait_for_ever() -> None:
    group = dist.new_group()
    numel = this_rank() + 1
    work = dist.all_gather_into_tensor(unfilled(numel * world_size()), unfilled(numel), group, async_op=True)
    assert not completes(work, 0.5)
    later = dist.all_reduce(unfilled(1), group=group, async_op=True)
    assert not completes(later, 0.2)
    with raises_saying("timed out"):
        work.wait(datetime.timedelta(milliseconds=100))


@leaves_groups_stuck
def test_ranks_that_do_different_things_wait_for_ever() -> None:
    differences: list[Callable[[Any], dist.Work]] = [
        lambda group: (dist.all_reduce if this_rank() == 0 else _broadcast)(unfilled(4), group=group, async_op=True),
        lambda group: dist.broadcast(unfilled(4), this_rank(), group, async_op=True),
        lambda group: dist.all_reduce(unfilled(4), _an_operation_of_its_own(), group, async_op=True),
    ]
    for difference in differences:
        assert not completes(difference(dist.new_group()), 0.3)


def _broadcast(tensor: torch.Tensor, **options: Any) -> Any:
    return dist.broadcast(tensor, 0, **options)


def _an_operation_of_its_own() -> Any:
    return dist.ReduceOp.SUM if this_rank() == 0 else dist.ReduceOp.MAX


@leaves_groups_stuck
def test_a_group_that_is_stuck_leaves_the_others_alone() -> None:
    numel = this_rank() + 1
    stuck = dist.all_reduce(unfilled(numel), group=dist.new_group(), async_op=True)
    assert not completes(stuck, 0.2)
    tensor = input_of().to(this_device())
    dist.all_reduce(tensor)
    assert_same(tensor, inputs_of_all().sum(0))
    assert not stuck.is_completed()
