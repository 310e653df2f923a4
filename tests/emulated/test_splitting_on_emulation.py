"""What a program with several meshes does: groups that are split off, collectives of gloo, attention on DTensors."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support.ranks import Setting, on_ranks, this_device, this_rank, together, world_size
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

on_two = on_ranks(Setting("emulated", 2))
on_four = on_ranks(Setting("emulated", 4))


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
def test_a_group_of_gloo_takes_tensors_of_inference_mode() -> None:
    group = dist.new_group(backend="gloo")
    with torch.inference_mode():
        total = torch.ones(2, device=this_device())
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2.0, 2.0]
    dist.destroy_process_group(group)


@on_two
def test_a_group_of_gloo_takes_tensors_of_the_device() -> None:
    group = dist.new_group(backend="gloo")
    own = torch.tensor([1.0 + this_rank(), 2.0], device=this_device())
    total = own.clone()
    dist.all_reduce(total, group=group)
    assert total.tolist() == [3.0, 4.0]
    gathered = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(gathered, own, group=group)
    assert [each.tolist() for each in gathered] == [[1.0, 2.0], [2.0, 2.0]]
    assert gathered[0].device == this_device()
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


@on_two
def test_a_collective_of_a_dtensor_is_refused_by_dtensor() -> None:
    """As on CUDA: what has no memory of its own is not sent."""
    sharded = distribute_tensor(torch.ones(4, 2, device=this_device()), dist.init_device_mesh("emulated", (2,)))
    with pytest.raises(NotImplementedError, match="sharding strategy"):
        dist.broadcast(sharded, 0)
    together()


@on_two
def test_attention_on_dtensors_is_that_on_whole_tensors() -> None:
    mesh = dist.init_device_mesh("emulated", (world_size(),))
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 8, 16, device=this_device(), requires_grad=True) for _ in range(3)]
    sharded = [distribute_tensor(each.detach(), mesh, [Shard(1)]).requires_grad_() for each in whole]
    for causal in (False, True):
        expected = functional.scaled_dot_product_attention(*whole, is_causal=causal)
        found = functional.scaled_dot_product_attention(*sharded, is_causal=causal)
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor(), expected)
        expected.sum().backward()
        found.sum().backward()
    torch.testing.assert_close([each.grad.full_tensor() for each in sharded], [each.grad for each in whole])


@on_two
def test_a_batch_norm_over_all_ranks_is_that_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4, 3, 5)
    own = inputs.chunk(2)[this_rank()].to(this_device()).requires_grad_()
    whole, parts = nn.BatchNorm1d(3), nn.SyncBatchNorm(3).to(this_device())
    everything = inputs.clone().requires_grad_()
    expected, found = whole(everything), parts(own)
    torch.testing.assert_close(found.cpu(), expected.chunk(2)[this_rank()])
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(own.grad.cpu(), everything.grad.chunk(2)[this_rank()], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(parts.running_var.cpu(), whole.running_var)


@on_two
def test_a_collective_that_nobody_waits_for_is_a_race_and_one_that_is_waited_for_is_none() -> None:
    emulated = torch.get_device_module("emulated")
    tensor = torch.ones(4, device=this_device())
    with emulated.race_detection():
        tensor.mul_(2)
        dist.all_reduce(tensor)
        tensor.mul_(2)
    try:
        with emulated.race_detection():
            work = dist.all_reduce(tensor, async_op=True)
            tensor.mul_(2)
            work.wait()
        found = ""
    except RuntimeError as error:
        found = str(error)
    assert "aten::mul_" in found
    assert "a collective" in found
