"""The dtypes that are asked for, and those that are kept."""

from __future__ import annotations

from collections.abc import Mapping

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
    world_size,
)
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    fully_shard,
)
from torch.distributed.tensor import Shard

from fsdp_doctor import compare_fingerprints, fingerprint, full_state_dict, local_shards, weights_info


@everywhere
def test_a_cast_of_shards_is_the_cast_of_the_whole() -> None:
    expected = tensors_of(new_net())
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        for model in (fsdp2(new_net()), fsdp1(new_net(empty=False))):
            actual = extracted(model, dtype=dtype)
            assert_same(actual, {name: tensor for name, tensor in cast_of(expected, dtype).items() if name in actual})
            assert set(expected) - set(actual) <= {"empty"}


class _OfManyDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 10)
        self.count = nn.Parameter(torch.arange(12).view(4, 3), requires_grad=False)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("phase", torch.tensor([1 + 2j, 3 - 4j]))
        self.register_buffer("scale", torch.rand(5, dtype=torch.float64))


@everywhere
def test_a_cast_leaves_what_is_not_floating_point_as_it_is() -> None:
    torch.manual_seed(0)
    net = _OfManyDtypes()
    expected = cast_of(tensors_of(net), torch.bfloat16)
    prints = fingerprint(net, dtype=torch.bfloat16)
    model = _whole_fsdp2(net)
    assert_same(extracted(model, dtype=torch.bfloat16), expected)
    state = full_state_dict(model, dtype=torch.bfloat16, ranks="all")
    assert_same(state, expected, device=torch.device("cpu"))
    announced = weights_info(model, dtype=torch.bfloat16)
    assert {name: one.dtype for name, one in announced.items()} == {name: t.dtype for name, t in expected.items()}
    for one in local_shards(model, dtype=torch.bfloat16):
        assert one.tensor.dtype == expected[one.name].dtype
    assert compare_fingerprints(fingerprint(model, dtype=torch.bfloat16), prints) == []


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


# What gloo carries under no name of its own, and 16-bit integers, which NCCL does not carry either.
_UNCARRIED = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.complex64, torch.complex128, torch.int16, torch.uint16)


class _OfBits(nn.Module):
    """Tensors of any bits: one that is gathered for itself, small ones, one row, and a buffer."""

    def __init__(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for index, shape in enumerate(shapes):
            bits = torch.randint(0, 100, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
            setattr(self, f"part{index}", nn.Parameter(bits.view(dtype).squeeze(-1), requires_grad=False))
        self.register_buffer("whole", self.part0.data[:1].clone())


def _bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, list[int]]]:
    return {
        name: (tensor.dtype, tensor.shape, tensor.cpu().contiguous().view(-1).view(torch.uint8).tolist())
        for name, tensor in tensors.items()
    }


@everywhere
def test_dtypes_that_no_backend_carries_are_gathered_bit_by_bit() -> None:
    for dtype in _UNCARRIED:
        net = _OfBits(dtype, (7, 6), (1, 4), (300, 4000 // dtype.itemsize), (6,))
        expected, fingerprints = _bits(tensors_of(net)), fingerprint(net)
        model = _whole_fsdp2(net)
        assert _bits(extracted(model)) == expected, dtype
        assert [shard.tensor.dtype for shard in local_shards(model)] == [dtype] * 5
        assert compare_fingerprints(fingerprint(model), fingerprints) == []
        across = _OfBits(dtype, (3, 4 * world_size()), (2, 5, world_size()))
        expected = _bits(tensors_of(across))
        model = fully_shard(across.to(this_device()), mesh=mesh_over(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
        assert _bits(extracted(model)) == expected, dtype


@everywhere
def test_fsdp1_units_of_8_bit_floats_are_gathered_bit_by_bit() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for use_orig_params in (True, False):
            net = _OfBits(dtype, (48, 64), (64, 48))
            expected = _bits(tensors_of(net))
            model = FullyShardedDataParallel(net, device_id=this_device(), use_orig_params=use_orig_params)
            for options in ({}, {"bucket_bytes": FEW_BYTES}):
                assert _bits(extracted(model, **options)) == expected


@everywhere
def test_a_cast_to_8_bit_floats_is_the_cast_of_the_whole() -> None:
    dtype = torch.float8_e4m3fn
    for model in (fsdp2(new_net()), fsdp1(new_net(empty=False))):
        expected = cast_of(extracted(model), dtype, *INTEGERS)
        assert _bits(extracted(model, dtype=dtype, keep_dtype=INTEGERS)) == _bits(expected)
