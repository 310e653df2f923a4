"""Flat parameters come out as they were before they were sharded; so do models under DDP and under nothing."""

from __future__ import annotations

import torch
from support.extraction import (
    EVEN,
    INTEGERS,
    MIB,
    UNEVEN,
    Many,
    all_trainable,
    assert_same,
    cast_of,
    everywhere,
    extracted,
    fsdp1,
    new_net,
    on_the_device,
    tensors_of,
    train_step,
)
from support.ranks import (
    this_device,
    world_size,
)
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    ShardingStrategy,
)
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor.extract.flat_transfers import FlatGather
from fsdp_doctor.extract.kept_plans import Arguments, plan_of


@everywhere
def test_fsdp1_is_as_before_sharding() -> None:
    for use_orig_params in (False, True):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            for dims in (EVEN, UNEVEN):
                net = new_net(**dims, empty=False)
                net = net if use_orig_params else all_trainable(net)
                expected = tensors_of(net)
                model = fsdp1(net, use_orig_params=use_orig_params, sharding_strategy=strategy)
                assert_same(extracted(model), expected)


@everywhere
def test_an_fsdp1_unit_larger_than_the_bucket_is_as_before_sharding() -> None:
    for use_orig_params in (False, True):
        net = all_trainable(new_net(empty=False))
        expected = tensors_of(net)
        model = fsdp1(net, use_orig_params=use_orig_params)
        for bucket_bytes in (64 << 10, 1_000_003, 3 * MIB):
            assert_same(extracted(model, bucket_bytes=bucket_bytes), expected)
            cast = extracted(model, bucket_bytes=bucket_bytes, dtype=torch.bfloat16, keep_dtype=(*INTEGERS, "embed*"))
            assert_same(cast, cast_of(expected, torch.bfloat16, "embed.weight", "head.weight"))


@everywhere
def test_an_fsdp1_unit_of_several_buckets_comes_in_strips() -> None:
    """Of more than two, with no tensor that is as large, for which there would be room for it as a whole."""
    for use_orig_params in (False, True):
        net = Many()
        expected = tensors_of(net)
        model = FullyShardedDataParallel(net, device_id=this_device(), use_orig_params=use_orig_params)
        for bucket_bytes in (30_000, 64 << 10, 200_003):
            arguments = Arguments.given(None, None, (), bucket_bytes, "merged")
            strips = [one for bucket in plan_of(model, arguments)[0].buckets for one in bucket.transfers]
            assert len(strips) > 2
            assert all(isinstance(one, FlatGather) for one in strips)
            assert_same(extracted(model, bucket_bytes=bucket_bytes), expected)
        kept = {"dtype": torch.bfloat16, "keep_dtype": ["parts.3", "parts.1?"]}
        names = ("parts.3", *(f"parts.{index}" for index in range(10, 20)))
        assert_same(extracted(model, bucket_bytes=64 << 10, **kept), cast_of(expected, torch.bfloat16, *names))


@everywhere
def test_an_empty_parameter_in_an_fsdp1_unit_is_yielded_once() -> None:
    """In the middle of the unit, and at its end, which is the end of the last rank's shard."""
    long, empty = 16 * world_size(), 0
    for lengths in ((long, empty, long), (long, empty)):
        for use_orig_params in (False, True):
            torch.manual_seed(0)
            net = nn.Sequential(nn.ParameterList(nn.Parameter(torch.randn(length)) for length in lengths))
            expected = tensors_of(net)
            model = FullyShardedDataParallel(net, device_id=this_device(), use_orig_params=use_orig_params)
            for bucket_bytes in (MIB, 64 * world_size()):
                assert_same(extracted(model, bucket_bytes=bucket_bytes), expected)


@on_the_device
def test_fsdp1_under_an_offload_is_gathered_on_the_device() -> None:
    for use_orig_params in (False, True):
        net = all_trainable(new_net(empty=False))
        expected = tensors_of(net)
        model = fsdp1(net, use_orig_params=use_orig_params, cpu_offload=CPUOffload(offload_params=True))
        assert_same(extracted(model), expected)
        train_step(model)
        changed = extracted(model, bucket_bytes=64 << 10)
        assert sorted(changed) == sorted(expected)
        assert not torch.equal(changed["embed.weight"].cpu(), expected["embed.weight"])
        assert_same(extracted(model), changed)


@everywhere
def test_ddp_and_no_wrapper_yield_plain_names() -> None:
    net = new_net(empty=False).to(this_device())
    expected = tensors_of(net)
    assert_same(extracted(net), expected)
    assert_same(extracted(DistributedDataParallel(net, find_unused_parameters=True)), expected)


@everywhere
def test_a_compiled_ddp_yields_plain_names() -> None:
    net = new_net(empty=False).to(this_device())
    expected = tensors_of(net)
    assert_same(extracted(torch.compile(DistributedDataParallel(net))), expected)
