"""Collectives of the emulated device: what each gives, when it is complete, which groups it concerns."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.ranks import Setting, accelerator, control, on_ranks, this_device, this_rank, together, world_size
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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

on_two = on_ranks(Setting("emulated", 2))
on_four = on_ranks(Setting("emulated", 4))


def input_of(rank: int | None = None, numel: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns what a rank brings, on the CPU: different everywhere, small enough to be exact in bfloat16."""
    return (torch.arange(1, numel + 1) + 4 * (this_rank() if rank is None else rank)).to(dtype)


def inputs_of_all(dtype: torch.dtype = torch.float32, numel: int = 4) -> torch.Tensor:
    return torch.stack([input_of(rank, numel, dtype) for rank in all_ranks()])


def unfilled(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(sizes, -1, dtype=dtype, device=this_device())


def completes(work: dist.Work, seconds: float = 2) -> bool:
    end = time.monotonic() + seconds
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.01)
    return work.is_completed()


_REDUCTIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda all_ranks: all_ranks.sum(0),
    dist.ReduceOp.AVG: lambda all_ranks: all_ranks.sum(0) / world_size(),
    dist.ReduceOp.MAX: lambda all_ranks: all_ranks.amax(0),
    dist.ReduceOp.MIN: lambda all_ranks: all_ranks.amin(0),
    dist.ReduceOp.PRODUCT: lambda all_ranks: all_ranks.prod(0),
}


@on_the_device
def test_all_reduce_and_reduce_reduce() -> None:
    for operation, expected in _REDUCTIONS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            if not (dtype == torch.int64 and operation == dist.ReduceOp.AVG):
                tensor = input_of(dtype=dtype).to(this_device())
                dist.all_reduce(tensor, operation)
                assert_same(tensor, expected(inputs_of_all()).to(dtype))
        for root in all_ranks():
            tensor = input_of().to(this_device())
            dist.reduce(tensor, root, operation)
            assert_same(tensor, expected(inputs_of_all()) if this_rank() == root else input_of())
    for operation in (dist.ReduceOp.MAX, dist.ReduceOp.SUM):
        anyone = torch.tensor([this_rank() == 0, False, True], device=this_device())
        dist.all_reduce(anyone, operation)
        assert anyone.view(torch.uint8).tolist() == [1, 0, 1]


@on_the_device
def test_a_premultiplied_sum_multiplies_first() -> None:
    for factor in (0.5, torch.tensor([0.5], device=this_device())):
        operation = dist._make_nccl_premul_sum(factor)
        tensor, part = input_of().to(this_device()), unfilled(2)
        dist.all_reduce(tensor, operation)
        assert_same(tensor, inputs_of_all().sum(0) / 2)
        dist.reduce_scatter_tensor(part, input_of(numel=2 * world_size()).to(this_device()), operation)
        assert_same(part, part_of(inputs_of_all(numel=2 * world_size()).sum(0)) / 2)


@on_the_device
def test_broadcast_gather_and_scatter_have_each_rank_as_their_root() -> None:
    for root in all_ranks():
        tensor, received = input_of().to(this_device()), unfilled(4)
        dist.broadcast(tensor, root)
        assert_same(tensor, input_of(root))
        gathered = [unfilled(4) for _ in all_ranks()] if this_rank() == root else None
        dist.gather(input_of().to(this_device()), gathered, root)
        if gathered is not None:
            assert_same(torch.stack(gathered), inputs_of_all())
        dist.scatter(received, list((inputs_of_all() + root).to(this_device())) if this_rank() == root else None, root)
        assert_same(received, input_of() + root)


@on_the_device
def test_all_gather_gathers_lists_joined_stacked_and_in_place() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        own = input_of(dtype=dtype).to(this_device())
        outputs, joined = [unfilled(4, dtype=dtype) for _ in all_ranks()], unfilled(4 * world_size(), dtype=dtype)
        stacked, scalars = unfilled(world_size(), 4, dtype=dtype), unfilled(world_size(), dtype=dtype)
        dist.all_gather(outputs, own)
        dist.all_gather_into_tensor(joined, own)
        dist.all_gather_into_tensor(stacked, own)
        dist.all_gather_into_tensor(scalars, own[0])
        for gathered in (torch.stack(outputs), joined.view(-1, 4), stacked):
            assert_same(gathered, inputs_of_all(dtype))
        assert_same(scalars, inputs_of_all(dtype)[:, 0])
    output = unfilled(4 * world_size())
    own = output.view(world_size(), 4)[this_rank()]
    own.copy_(input_of())
    dist.all_gather_into_tensor(output, own)
    assert_same(output, inputs_of_all().flatten())


@on_the_device
def test_all_gather_gathers_tensors_of_different_sizes() -> None:
    """NCCL does it, by a broadcast from each rank."""
    outputs = [unfilled(rank + 1) for rank in all_ranks()]
    own = input_of(numel=this_rank() + 1).to(this_device())
    work = dist.all_gather(outputs, own, group=dist.new_group(), async_op=True)
    assert completes(work), "it is not complete after 2 seconds"
    for rank, output in enumerate(outputs):
        assert_same(output, input_of(rank, rank + 1))


@on_the_device
def test_reduce_scatter_reduces_and_deals_out() -> None:
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        for dtype in (torch.float32, torch.bfloat16):
            own = input_of(numel=2 * world_size(), dtype=dtype).to(this_device())
            expected = part_of(_REDUCTIONS[operation](inputs_of_all(numel=2 * world_size())).to(dtype))
            from_list, from_tensor = unfilled(2, dtype=dtype), unfilled(2, dtype=dtype)
            dist.reduce_scatter(from_list, list(own.chunk(world_size())), operation)
            dist.reduce_scatter_tensor(from_tensor, own, operation)
            assert_same(from_list, expected)
            assert_same(from_tensor, expected)
            assert_same(own, input_of(numel=2 * world_size(), dtype=dtype))


def _sent(source: int, target: int) -> torch.Tensor:
    """Rows of different number for each pair of ranks, none for some."""
    return torch.full(((source + 2 * target) % 3, 2), 10.0 * source + target)


@on_the_device
def test_all_to_all_exchanges_parts_of_equal_and_different_sizes() -> None:
    equal = unfilled(2 * world_size())
    dist.all_to_all_single(equal, input_of(numel=2 * world_size()).to(this_device()))
    assert_same(equal, torch.cat([part_of(input_of(rank, 2 * world_size())) for rank in all_ranks()]))
    sent = [_sent(this_rank(), target).to(this_device()) for target in all_ranks()]
    received = [_sent(source, this_rank()) for source in all_ranks()]
    output, outputs = unfilled(sum(map(len, received)), 2), [unfilled(*tensor.shape) for tensor in received]
    dist.all_to_all_single(output, torch.cat(sent), [*map(len, received)], [*map(len, sent)])
    assert_same(output, torch.cat(received))
    dist.all_to_all(outputs, sent)
    assert_same(torch.cat(outputs), torch.cat(received))


@on_the_device
def test_sends_and_receives_pass_tensors_round() -> None:
    following, previous = (this_rank() + 1) % world_size(), (this_rank() - 1) % world_size()
    own, output = input_of().to(this_device()), unfilled(4)
    steps = [lambda: dist.send(own, following), lambda: dist.recv(output, previous)]
    for step in steps if this_rank() == 0 else reversed(steps):
        step()
    assert_same(output, input_of(previous))
    output = unfilled(4)
    for work in [dist.irecv(output, previous), dist.isend(own, following)]:
        work.wait()
        assert work.is_completed()
    assert_same(output, input_of(previous))
    outputs = [unfilled(4), unfilled(4)]
    sends = [dist.P2POp(dist.isend, tensor, following) for tensor in (own, -own)]
    for work in dist.batch_isend_irecv([*sends, *(dist.P2POp(dist.irecv, each, previous) for each in outputs)]):
        work.wait()
    assert_same(torch.stack(outputs), torch.stack([input_of(previous), -input_of(previous)]))


@on_the_device
def test_functional_collectives_give_what_they_say() -> None:
    own, wide = input_of().to(this_device()), input_of(numel=2 * world_size()).to(this_device())
    reduced = part_of(inputs_of_all(numel=2 * world_size()).sum(0))
    assert_same(funcol.all_reduce(own, "avg", mesh_of_all()), inputs_of_all().sum(0) / world_size())
    assert_same(funcol.all_gather_tensor(own, 0, mesh_of_all()), inputs_of_all().flatten())
    assert_same(funcol.reduce_scatter_tensor(wide, "sum", 0, mesh_of_all()), reduced)
    exchanged = torch.cat([part_of(input_of(rank, 2 * world_size())) for rank in all_ranks()])
    assert_same(funcol.all_to_all_single(wide, None, None, mesh_of_all()), exchanged)
    assert_same(funcol.broadcast(own, 1, mesh_of_all()), input_of(1))
    many = funcol.all_gather_into_tensor_coalesced([own, own + 1], dist.group.WORLD)
    assert_same(torch.stack(list(many)), torch.stack([inputs_of_all().flatten(), inputs_of_all().flatten() + 1]))
    assert_same(own, input_of())


class Wrapped(torch.Tensor):
    """A tensor around another one, with no memory of its own."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map_only(cls, lambda wrapped: wrapped.inner, args), **(kwargs or {}))


@on_the_device
def test_a_collective_of_a_subclass_sends_what_the_class_says() -> None:
    for group in (None, dist.new_group(backend="gloo")):
        tensor = Wrapped(input_of().to(this_device()))
        dist.broadcast(tensor, 0, group)
        assert_same(tensor.inner, input_of(0))
        pieces = [Wrapped(input_of(rank).to(this_device())) for rank in range(world_size())]
        received = Wrapped(torch.zeros_like(pieces[0].inner))
        dist.scatter(received, pieces if dist.get_rank() == 0 else None, 0, group)
        assert_same(received.inner, input_of())


# When a collective is complete


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
        objects, mine = ["from", this_rank()], [None]
        dist.broadcast_object_list(objects, 1, group)
        assert objects == ["from", 1]
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
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert_same(tensor, inputs_of_all().sum(0))
    assert_same(doubled.wait(), 2 * inputs_of_all().sum(0))


@on_the_device
def test_collectives_of_one_group_complete_in_the_order_of_their_calls() -> None:
    """A group of NCCL has one stream, so who waits for the last has waited for all."""
    tensors = [torch.ones(numel, device=this_device()) for numel in (1_000_000, 1)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[-1].wait()
    assert works[0].is_completed()
    assert_same(tensors[0], torch.full((1_000_000,), float(world_size())))
    many = [(input_of() + index).to(this_device()) for index in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in many]
    for index in reversed(range(20)):
        works[index].wait()
        assert_same(many[index], (inputs_of_all() + index).sum(0))


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
    with dist._coalescing_manager(dist.group.WORLD, device=this_device()):
        for output, tensor in zip(ones, whole, strict=True):
            dist.reduce_scatter_tensor(output, tensor)
    for tensor in reduced:
        assert_same(tensor, torch.full_like(tensor, world_size()))
    for tensor in ones:
        assert_same(tensor.cpu(), torch.full_like(tensor.cpu(), world_size() ** 2))


@on_the_device
def test_what_a_collective_was_given_is_counted_off_when_it_is_freed() -> None:
    before, after = allocated_bytes(), []
    for _ in range(50):
        dist.all_reduce(unfilled(1000))
        dist.all_gather_into_tensor(unfilled(1000 * world_size()), unfilled(1000))
        after.append(accelerator().memory_allocated())
    assert after == [before] * 50, f"{before} before, {sorted(set(after))} after"


@on_the_device
def test_a_collective_sees_the_copies_that_its_stream_holds() -> None:
    for stream in (None, torch.Stream(this_device())):
        with accelerator().stream(stream):
            tensor = unfilled(4)
            tensor.copy_(input_of().pin_memory(), non_blocking=True)
            dist.all_reduce(tensor)
            assert_same(tensor, inputs_of_all().sum(0))


def _reduce_and_change(tensor: torch.Tensor) -> None:
    with accelerator().race_detection():
        work = dist.all_reduce(tensor, async_op=True)
        tensor.mul_(2)
        work.wait()


@on_two
def test_a_collective_is_a_race_only_where_nobody_waits_for_it() -> None:
    tensor = torch.ones(4, device=this_device())
    with accelerator().race_detection():
        tensor.mul_(2)
        dist.all_reduce(tensor)
        tensor.mul_(2)
    with pytest.raises(RuntimeError) as race:
        _reduce_and_change(tensor)
    assert "aten::mul_" in str(race.value)
    assert "a collective" in str(race.value)
    replicated = DistributedDataParallel(nn.Linear(4, 4, device=this_device()))
    with accelerator().race_detection():
        work = dist.all_reduce(tensor, async_op=True)
        assert completes(work)
        tensor.mul_(2)
        dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0].div_(2)).wait()
        tensor.mul_(2)
        replicated(tensor).sum().backward()
        torch.optim.SGD(replicated.parameters()).step()


# Groups


@on_the_device
def test_a_group_of_some_ranks_leaves_the_others_out() -> None:
    members = [0, world_size() - 1]
    group, (alone, _) = dist.new_group(members), dist.new_subgroups(1)
    tensor = input_of().to(this_device())
    if this_rank() in members:
        dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=alone)
    assert_same(tensor, input_of(0) + input_of(world_size() - 1) if this_rank() in members else input_of())


@on_the_device
def test_groups_used_in_different_orders_by_ranks_do_not_block_each_other() -> None:
    groups = [dist.new_group(), dist.new_group()]
    order = (0, 1) if this_rank() % 2 == 0 else (1, 0)
    tensors = [input_of().to(this_device()), -input_of().to(this_device())]
    for _ in range(10):
        works = [dist.all_reduce(tensors[index], dist.ReduceOp.AVG, groups[index], async_op=True) for index in order]
        for work in works:
            work.wait()
    assert_close(tensors[0], inputs_of_all().mean(0))
    assert_close(tensors[1], -inputs_of_all().mean(0))


@contextlib.contextmanager
def bound_to_its_device() -> Iterator[dist.ProcessGroup]:
    """The world as ``init_process_group(device_id=...)`` leaves it."""
    world = dist.group.WORLD
    world.bound_device_id = this_device()
    try:
        yield world
    finally:
        world.bound_device_id = None


@on_four
def test_a_mesh_of_two_dimensions_splits_the_world() -> None:
    with bound_to_its_device():
        mesh = dist.init_device_mesh("emulated", (2, 2), mesh_dim_names=("replicate", "shard"))
        for name, expected in (("shard", this_rank() // 2 * 4 + 1), ("replicate", this_rank() % 2 * 2 + 2)):
            tensor = torch.tensor([float(this_rank())], device=this_device())
            dist.all_reduce(tensor, group=mesh.get_group(name))
            assert tensor.item() == expected
    together()


@on_two
def test_a_group_that_some_ranks_are_no_part_of_is_split_off() -> None:
    with bound_to_its_device():
        group = dist.split_group(split_ranks=[[1]])
        assert (group is None) == (this_rank() == 0)
        new = dist.new_group([1])
        if this_rank() == 1:
            for one in (group, new):
                tensor = torch.ones(2, device=this_device())
                dist.all_reduce(tensor, group=one)
                assert tensor.tolist() == [1.0, 1.0]
                assert dist.get_world_size(one) == 1
    together()


@on_two
def test_ranks_that_disagree_about_a_split_are_told_after_its_timeout() -> None:
    parent = dist.new_group(backend="emulated")
    second = datetime.timedelta(seconds=1)
    with bound_to_its_device():
        if this_rank() == 0:
            with pytest.raises(dist.DistStoreError, match="wait timeout after 1000ms"):
                dist.split_group(parent, [[0, 1]], timeout=second)
        else:
            assert dist.get_world_size(dist.split_group(parent, [[0], [1]], timeout=second)) == 1
    together()


@on_two
def test_a_group_that_was_destroyed_refuses_collectives_in_the_words_of_nccl() -> None:
    group = dist.new_group(backend="emulated")
    tensor = torch.ones(2, device=this_device())
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    with pytest.raises(dist.DistBackendError, match="NCCL communicator was aborted on rank"):
        group.allreduce([tensor])
    with pytest.raises(ValueError, match="is not initialized in the world group map"):
        dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0, 2.0]
    dist.all_reduce(tensor)
    assert tensor.tolist() == [4.0, 4.0]


@on_two
def test_a_gloo_group_accepts_tensors_of_the_device_and_of_inference_mode() -> None:
    group = dist.new_group(backend="gloo")
    own = torch.tensor([1.0 + this_rank(), 2.0], device=this_device())
    with torch.inference_mode():
        total = own.clone()
        dist.all_reduce(total, group=group)
        assert total.tolist() == [3.0, 4.0]
    gathered = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(gathered, own, group=group)
    assert [each.tolist() for each in gathered] == [[1.0, 2.0], [2.0, 2.0]]
    dist.broadcast(own, 1, group=group)
    assert own.tolist() == [2.0, 2.0]
    if this_rank() == 0:
        dist.isend(own * 3, 1, group=group).wait()
    else:
        dist.recv(own, 0, group=group)
        assert own.tolist() == [6.0, 6.0]
    host = torch.ones(1)
    dist.all_reduce(host, group=group)
    assert host.item() == 2


# What is built on collectives


@on_two
def test_attention_on_dtensors_is_that_on_whole_tensors() -> None:
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 8, 16, device=this_device(), requires_grad=True) for _ in range(3)]
    sharded = [distribute_tensor(each.detach(), mesh_of_all(), [Shard(1)]).requires_grad_() for each in whole]
    for causal in (False, True):
        expected = functional.scaled_dot_product_attention(*whole, is_causal=causal)
        result = functional.scaled_dot_product_attention(*sharded, is_causal=causal)
        assert isinstance(result, DTensor)
        torch.testing.assert_close(result.full_tensor(), expected)
        expected.sum().backward()
        result.sum().backward()
    torch.testing.assert_close([each.grad.full_tensor() for each in sharded], [each.grad for each in whole])


@on_two
def test_a_batch_norm_over_all_ranks_is_that_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4, 3, 5)
    own = inputs.chunk(2)[this_rank()].to(this_device()).requires_grad_()
    whole, parts = nn.BatchNorm1d(3), nn.SyncBatchNorm(3).to(this_device())
    everything = inputs.clone().requires_grad_()
    expected, result = whole(everything), parts(own)
    torch.testing.assert_close(result.cpu(), expected.chunk(2)[this_rank()])
    expected.square().sum().backward()
    result.square().sum().backward()
    torch.testing.assert_close(own.grad.cpu(), everything.grad.chunk(2)[this_rank()], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(parts.running_var.cpu(), whole.running_var)


# Refusals, and ranks that wait for ever

leaves_groups_stuck = on_ranks(Setting("emulated", 2), Setting("emulated", 3), last_of_its_ranks=True)


@on_the_device
def test_a_tensor_is_refused_if_the_group_lacks_its_devices_backend() -> None:
    alone = group_of_the_device_alone()
    with raises_saying("No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=alone)
    with raises_saying("No backend type associated with device type emulated"):
        dist.all_reduce(unfilled(1), group=dist.new_group(backend="cpu:gloo"))
    mesh = DeviceMesh.from_group(alone, "emulated", mesh_dim_names=("alone",))
    model = fully_shard(new_net(), mesh=mesh, offload_policy=CPUOffloadPolicy())
    with raises_saying("No backend type associated with device type cpu"):
        model.head.weight.full_tensor()


@on_the_device
def test_what_nccl_refuses_is_refused_with_its_errors() -> None:
    size, integers, root = world_size(), unfilled(4, dtype=torch.int64), dist.GatherOptions()
    root.rootRank = size
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device(this_device()))
    ops = dist.ReduceOp
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "must be contiguous", lambda: dist.all_reduce(unfilled(4, 4)[:, :2])),
        (ValueError, "must be contiguous", lambda: dist.broadcast(unfilled(4, 3).t(), 0)),
        (ValueError, "device and dense", lambda: dist.all_reduce_coalesced([unfilled(4), torch.ones(4)])),
        (
            ValueError,
            "world_size times input",
            lambda: dist.all_gather_into_tensor(unfilled(4 * size + 1), unfilled(4)),
        ),
        (TypeError, "the same type", lambda: dist.all_gather_into_tensor(unfilled(4 * size), integers)),
        (ValueError, "output size times", lambda: dist.reduce_scatter_tensor(unfilled(4), unfilled(4 * size + 1))),
        (TypeError, "the same type", lambda: dist.reduce_scatter_tensor(integers, unfilled(4 * size))),
        *(
            (ValueError, "Cannot use ReduceOp", lambda bits=bits: dist.all_reduce(integers, bits))
            for bits in (ops.BAND, ops.BOR, ops.BXOR)
        ),
        (TypeError, "AVG with boolean", lambda: dist.all_reduce(unfilled(4, dtype=torch.bool), ops.AVG)),
        (TypeError, "not supported for NCCL", lambda: dist.all_reduce(unfilled(4, dtype=torch.int16))),
        (dist.DistBackendError, "invalid argument", lambda: dist.broadcast(unfilled(4), size)),
        (ValueError, "invalid root rank", lambda: backend.gather([], [unfilled(4)], root)),
    ]
    for error, words, call in refused:
        with pytest.raises(error, match=words):
            call()


@leaves_groups_stuck
def test_ranks_with_different_sizes_or_calls_wait_while_other_groups_go_on() -> None:
    group, numel = dist.new_group(), this_rank() + 1
    different: dict[str, Callable[[Any], dist.Work]] = {
        "what": lambda group: (
            dist.all_reduce(unfilled(4), group=group, async_op=True)
            if this_rank() == 0
            else dist.broadcast(unfilled(4), 0, group, async_op=True)
        ),
        "root": lambda group: dist.broadcast(unfilled(4), this_rank(), group, async_op=True),
        "operation": lambda group: dist.all_reduce(
            unfilled(4), dist.ReduceOp.SUM if this_rank() == 0 else dist.ReduceOp.MAX, group, async_op=True
        ),
    }
    stuck = dist.all_gather_into_tensor(unfilled(numel * world_size()), unfilled(numel), group, async_op=True)
    later = dist.all_reduce(unfilled(1), group=group, async_op=True)
    others = {what: start(dist.new_group()) for what, start in different.items()}
    assert not completes(stuck, 0.5)
    assert [what for what, work in others.items() if work.is_completed()] == []
    assert not later.is_completed()
    with raises_saying("timed out"):
        stuck.wait(datetime.timedelta(milliseconds=100))
    tensor = input_of().to(this_device())
    dist.all_reduce(tensor)
    assert_same(tensor, inputs_of_all().sum(0))
    assert not stuck.is_completed()
