"""The dtypes that are asked for, and those that are kept."""

from __future__ import annotations

import torch
from support.extraction import (
    FEW_BYTES,
    INTEGERS,
    assert_same,
    cast_of,
    everywhere,
    extracted,
    fsdp1,
    fsdp2,
    mesh_over,
    new_net,
    on_the_device,
    tensors_of,
)
from support.ranks import (
    this_device,
)
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    fully_shard,
)


@everywhere
def test_a_cast_of_shards_is_the_cast_of_the_whole() -> None:
    expected = tensors_of(new_net())
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        for model in (fsdp2(new_net()), fsdp1(new_net(empty=False))):
            actual = extracted(model, dtype=dtype, keep_dtype=INTEGERS)
            assert_same(actual, {name: tensor for name, tensor in cast_of(expected, dtype).items() if name in actual})
            assert set(expected) - set(actual) <= {"empty"}


@everywhere
def test_tensors_of_several_dtypes_in_one_bucket_are_as_before_sharding() -> None:
    """Of their own, and by keep_dtype."""
    for group, shard in (("fsdp2", _whole_fsdp2), ("fsdp1", _whole_fsdp1)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6))
        if group == "fsdp2":
            net[1].to(torch.bfloat16)
        expected = tensors_of(net)
        model = shard(net)
        assert_same(extracted(model), expected)
        cast = cast_of(expected, torch.float16, "1.weight", "1.bias")
        assert_same(extracted(model, dtype=torch.float16, keep_dtype="1.*"), cast)


def _whole_fsdp2(net: nn.Module) -> nn.Module:
    return fully_shard(net.to(this_device()), mesh=mesh_over())


def _whole_fsdp1(net: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=this_device(), use_orig_params=True)


@everywhere
def test_keep_dtype_takes_names_and_patterns() -> None:
    net = new_net()
    expected = tensors_of(net)
    model = fsdp2(net)
    frozen = [f"layers.{index}.frozen" for index in range(2)]
    for keep, kept in (
        (("large.weight",), ["large.weight"]),
        (("layers.*.frozen",), frozen),
        # The second name of a tied pair keeps the first.
        (("head.weight",), ["embed.weight", "head.weight"]),
        (("layers.?.frozen", "scale"), [*frozen, "scale"]),
    ):
        actual = extracted(model, dtype=torch.bfloat16, keep_dtype=(*INTEGERS, *keep), bucket_bytes=FEW_BYTES)
        assert_same(actual, cast_of(expected, torch.bfloat16, *kept))


@on_the_device
def test_a_cast_of_offloaded_shards_is_the_cast_of_the_whole() -> None:
    net = new_net()
    expected = cast_of(tensors_of(net), torch.bfloat16, "scale")
    model = fsdp2(net, offload_policy=CPUOffloadPolicy(pin_memory=True))
    assert_same(extracted(model, dtype=torch.bfloat16, keep_dtype=(*INTEGERS, "sc*")), expected)
    net = new_net(empty=False)
    model = fsdp1(net, cpu_offload=CPUOffload(offload_params=True))
    del expected["empty"]
    assert_same(extracted(model, dtype=torch.bfloat16, keep_dtype=(*INTEGERS, "sc*")), expected)
