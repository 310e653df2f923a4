"""Full tensors are the model before it was sharded, in every state of both FSDPs; the live model is left alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from support.extraction import (
    EVEN,
    FEW_BYTES,
    INTEGERS,
    MIB,
    UNEVEN,
    Many,
    all_trainable,
    assert_same,
    at_any_size,
    cast_of,
    everywhere,
    extracted,
    fsdp1,
    fsdp2,
    local_of,
    mesh_over,
    new_net,
    on_the_device,
    plan_for,
    qwen,
    shard_qwen2,
    sharded_net,
    sharded_net1,
    tensors_of,
    train_step,
)
from support.ranks import Setting, accelerator, device_type, on_ranks, this_device, this_rank, together, world_size
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor import compare_fingerprints, fingerprint, full_state_dict, full_tensors, local_shards, weights_info
from fsdp_doctor.weights.transport.transfers import FlatGather


@at_any_size
def test_fsdp2_even_and_uneven_rows_are_as_before_sharding() -> None:
    for dims in (EVEN, UNEVEN):
        model, expected = sharded_net(dims=dims)
        for options in ({}, {"bucket_bytes": FEW_BYTES}, {"bucket_bytes": 1}, {"bucket_bytes": 3 * MIB}):
            assert_same(extracted(model, **options), expected)


@everywhere
def test_fsdp2_after_training_it_is_what_the_shards_hold() -> None:
    model = fsdp2(new_net())
    train_step(model)
    expected = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        expected[name] = parameter.detach().full_tensor()
    assert_same({name: tensor for name, tensor in extracted(model).items() if name in expected}, expected)


@everywhere
def test_a_parameter_sharded_by_columns_is_as_before_sharding() -> None:
    net = new_net(rows=24, hidden=12, large_rows=1032)
    expected = tensors_of(net)
    by_columns = {parameter for parameter in net.parameters() if parameter.ndim == 2 and parameter.shape[1] == 12}
    assert by_columns
    model = fsdp2(net, shard_placement_fn=lambda parameter: Shard(1) if parameter in by_columns else None)
    placed = [p for p in model.parameters() if isinstance(p, DTensor) and p.placements == (Shard(1),)]
    assert len(placed) == len(by_columns)
    assert_same(extracted(model), expected)
    assert_same(extracted(model, dtype=torch.bfloat16, keep_dtype=INTEGERS), cast_of(expected, torch.bfloat16))


@on_ranks(Setting("cpu", 4))
def test_hsdp_gathers_each_replica() -> None:
    for dims in (EVEN, UNEVEN):
        model, expected = sharded_net(mesh_over(2, 2), dims=dims)
        for options in ({}, {"bucket_bytes": FEW_BYTES}):
            assert_same(extracted(model, **options), expected)


@on_ranks(Setting("cpu", 4))
def test_tensor_parallel_layers_are_as_before_sharding() -> None:
    """Norms of the layers are on one dim of the mesh, the linears on both."""
    for width, hidden in ((16, 32), (8, 20)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width))
        expected = tensors_of(net)
        mesh = mesh_over(2, 2)
        parallelize_module(net, mesh["inner"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(net, mesh=mesh["outer"])
        assert_same(extracted(net), expected)
        assert_same(extracted(net, bucket_bytes=64), expected)
        assert_same(extracted(net, dtype=torch.bfloat16), cast_of(expected, torch.bfloat16))


@everywhere
def test_an_ignored_parameter_is_yielded_too() -> None:
    net = new_net().to(this_device())
    expected = tensors_of(net)
    model = fsdp2(net, ignored_params={net.large.weight})
    assert not isinstance(model.large.weight, DTensor)
    assert_same(extracted(model), expected)
    assert extracted(model)["large.weight"].data_ptr() != model.large.weight.data_ptr()


@everywhere
def test_tied_names_share_one_tensor() -> None:
    for model in (fsdp2(new_net()), fsdp1(new_net(empty=False))):
        for options in ({}, {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}):
            tensors = extracted(model, **options)
            assert tensors["embed.weight"] is tensors["head.weight"]


@everywhere
def test_after_a_forward_without_a_backward_it_is_the_masters() -> None:
    """Torch leaves the root's parameters gathered, in the dtype of the computation."""
    for build in (_mixed_fsdp1, _mixed_fsdp2):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
        expected = tensors_of(net)
        model = build(net)
        with torch.no_grad():
            model(torch.ones(2, 7, device=this_device()))
        assert_same(extracted(model), expected)


def _mixed_fsdp2(net: nn.Module) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    net = net.to(this_device())
    fully_shard(net[0], mesh=mesh_over(), mp_policy=policy)
    return fully_shard(net, mesh=mesh_over(), mp_policy=policy)


def _mixed_fsdp1(net: nn.Module) -> nn.Module:
    options = {"device_id": this_device(), "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    net[0] = FullyShardedDataParallel(net[0], **options)
    return FullyShardedDataParallel(net, **options)


@on_the_device
def test_shards_under_a_policy_are_gathered_on_the_device() -> None:
    for pin_memory in (True, False):
        for dims in (EVEN, UNEVEN):
            model, expected = sharded_net(dims=dims, offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
            assert model.embed.weight.device.type == "cpu"
            assert model.embed.weight.to_local().is_pinned() == pin_memory
            assert_same(extracted(model), expected)
            assert_same(extracted(model, bucket_bytes=FEW_BYTES), expected)
            assert model.embed.weight.device.type == "cpu"
            train_step(model)


@on_the_device
def test_a_model_moved_manually_to_the_cpu_is_gathered_on_the_device() -> None:
    # Of uneven shards that were moved without waiting torch itself makes something else.
    for dims, non_blocking in ((EVEN, False), (UNEVEN, False), (EVEN, True)):
        model, expected = sharded_net(dims=dims)
        model.to("cpu", non_blocking=non_blocking)
        if non_blocking:
            accelerator().synchronize()
        assert_same(extracted(model), expected)
        assert {p.device.type for p in model.parameters()} == {"cpu"}


@on_the_device
def test_a_half_moved_model_is_gathered() -> None:
    """``model.to(device)`` under a pinned policy moves the local tensors and leaves torch's own references behind."""
    model, expected = sharded_net(offload_policy=CPUOffloadPolicy(pin_memory=True))
    model.to(this_device())
    assert_same(extracted(model), expected)
    assert_same(extracted(model, dtype=torch.bfloat16, keep_dtype=INTEGERS), cast_of(expected, torch.bfloat16))


@at_any_size
def test_fsdp1_is_as_before_sharding() -> None:
    for use_orig_params in (False, True):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            for dims in (EVEN, UNEVEN):
                options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
                model, expected = sharded_net1(dims=dims, **options)
                assert_same(extracted(model), expected)


@everywhere
def test_an_fsdp1_unit_larger_than_the_bucket_is_as_before_sharding() -> None:
    for use_orig_params in (False, True):
        model, expected = sharded_net1(use_orig_params=use_orig_params)
        for bucket_bytes in (64 << 10, 1_000_003, 3 * MIB):
            assert_same(extracted(model, bucket_bytes=bucket_bytes), expected)
            cast = extracted(model, bucket_bytes=bucket_bytes, dtype=torch.bfloat16, keep_dtype=(*INTEGERS, "embed*"))
            assert_same(cast, cast_of(expected, torch.bfloat16, "embed.weight", "head.weight"))


@everywhere
def test_an_fsdp1_unit_of_several_buckets_comes_in_strips() -> None:
    """The unit takes more than two buckets; a tensor as large would make room for the unit as a whole."""
    for use_orig_params in (False, True):
        net = Many()
        expected = tensors_of(net)
        model = FullyShardedDataParallel(net, device_id=this_device(), use_orig_params=use_orig_params)
        for bucket_bytes in (30_000, 64 << 10, 200_003):
            strips = [transfer for bucket in plan_for(model, bucket_bytes).buckets for transfer in bucket.transfers]
            assert len(strips) > 2
            assert all(isinstance(one, FlatGather) for one in strips)
            assert_same(extracted(model, bucket_bytes=bucket_bytes), expected)
        kept = {"dtype": torch.bfloat16, "keep_dtype": ["parts.3", "parts.1?"]}
        names = ("parts.3", *(f"parts.{index}" for index in range(10, 20)))
        assert_same(extracted(model, bucket_bytes=64 << 10, **kept), cast_of(expected, torch.bfloat16, *names))


@everywhere
def test_an_empty_parameter_in_an_fsdp1_unit_is_yielded_once() -> None:
    """Covers the middle of the unit and its end, which is the end of the last rank's shard."""
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
        offload = CPUOffload(offload_params=True)
        model, expected = sharded_net1(use_orig_params=use_orig_params, cpu_offload=offload)
        assert_same(extracted(model), expected)
        train_step(model)
        changed = extracted(model, bucket_bytes=64 << 10)
        assert sorted(changed) == sorted(expected)
        assert not torch.equal(changed["embed.weight"].cpu(), expected["embed.weight"])
        assert_same(extracted(model), changed)


@on_the_device
def test_ddp_and_no_wrapper_yield_plain_names() -> None:
    net = new_net(empty=False).to(this_device())
    expected = tensors_of(net)
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    for model in (net, ddp, torch.compile(ddp)):
        assert_same(extracted(model), expected)


@everywhere
def test_any_rank_alone_extracts_a_model_that_nothing_shards() -> None:
    torch.manual_seed(this_rank())
    net = nn.Linear(4, 4).to(this_device())
    if this_rank() == 1:
        assert_same(extracted(net), tensors_of(net))
        assert_same(full_state_dict(net, ranks="all"), tensors_of(net), torch.device("cpu"))
        assert set(fingerprint(net).tensors) == {"weight", "bias"}
    together()
    assert_same(extracted(net), tensors_of(net))


def _state(model: nn.Module) -> list[tuple[str, Any, torch.Tensor, bool, torch.device, int]]:
    return [
        (name, type(tensor), local_of(tensor).clone(), tensor.requires_grad, tensor.device, local_of(tensor).data_ptr())
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]


@everywhere
def test_the_live_model_and_its_training_are_left_alone() -> None:
    builders: list[Callable[[], nn.Module]] = [
        lambda: fsdp2(new_net()),
        lambda: fsdp1(new_net(empty=False)),
        lambda: fsdp1(all_trainable(new_net(empty=False)), use_orig_params=False),
    ]
    if device_type() != "cpu":
        builders.append(lambda: fsdp2(new_net(), offload_policy=CPUOffloadPolicy(pin_memory=True)))
    for build in builders:
        left_alone, model = build(), build()
        assert train_step(left_alone) == train_step(model)
        before = _state(model)
        for _, tensor in full_tensors(model, dtype=torch.bfloat16, keep_dtype=INTEGERS, bucket_bytes=64 << 10):
            tensor.fill_(1)
        for _, tensor in full_tensors(model):
            tensor.fill_(1)
        for one, other in zip(before, _state(model), strict=True):
            assert one[:2] + one[3:] == other[:2] + other[3:], f"{one[0]} is not what it was"
            assert torch.equal(one[2].cpu(), other[2].cpu()), f"{one[0]} has other values"
        losses = [(train_step(left_alone, seed), train_step(model, seed)) for seed in (1, 2)]
        assert all(one == other for one, other in losses), losses


@on_the_device
def test_tensors_that_are_kept_do_not_change_when_training_goes_on() -> None:
    for model in (fsdp2(new_net()), fsdp1(new_net(empty=False))):
        kept, state = extracted(model), full_state_dict(model, ranks="all")
        copies, copies_of_state = ({name: t.clone() for name, t in tensors.items()} for tensors in (kept, state))
        train_step(model)
        later = extracted(model)
        assert_same(kept, copies)
        assert_same(state, copies_of_state, torch.device("cpu"))
        assert not torch.equal(later["embed.weight"], kept["embed.weight"])


@on_the_device
def test_wrapped_layers_have_plain_names() -> None:
    for wrap in (checkpoint_wrapper, torch.compile, lambda layer: torch.compile(checkpoint_wrapper(layer))):
        for shard in (fsdp2, fsdp1):
            net = new_net(empty=False)
            expected = tensors_of(net)
            for index, layer in enumerate(net.layers):
                net.layers[index] = wrap(layer)
            assert_same(extracted(shard(net)), expected)


@on_the_device
def test_fsdp1_around_a_compiled_model_has_its_root_unit() -> None:
    """FSDP1's module has the attributes of what it wraps, ``_orig_mod`` too."""
    for use_orig_params in (True, False):
        net = all_trainable(new_net(empty=False))
        expected = tensors_of(net)
        for index, layer in enumerate(net.layers):
            net.layers[index] = FullyShardedDataParallel(
                layer, device_id=this_device(), use_orig_params=use_orig_params
            )
        compiled = torch.compile(net)
        model = FullyShardedDataParallel(compiled, device_id=this_device(), use_orig_params=use_orig_params)  # type: ignore[arg-type]
        assert_same(extracted(model), expected)


@on_the_device
def test_a_transformer_with_gradient_checkpointing_is_as_before_sharding() -> None:
    model = qwen()
    expected = tensors_of(model)
    model.gradient_checkpointing_enable()
    model = shard_qwen2(model.train())
    assert_same(extracted(model), expected)
    tokens = torch.arange(8, device=this_device()).view(1, 8)
    model(tokens, labels=tokens).loss.backward()
    assert_same(extracted(model), expected)


@everywhere
def test_a_cast_of_shards_is_the_cast_of_the_whole() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn):
        for model, expected in (sharded_net(), sharded_net1()):
            assert _bits(extracted(model, dtype=dtype)) == _bits(cast_of(expected, dtype))


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
    assert {name: info.dtype for name, info in announced.items()} == {name: t.dtype for name, t in expected.items()}
    for info in local_shards(model, dtype=torch.bfloat16):
        assert info.tensor.dtype == expected[info.name].dtype
    assert compare_fingerprints(fingerprint(model, dtype=torch.bfloat16), prints) == []


@everywhere
def test_tensors_of_several_dtypes_in_one_bucket_are_as_before_sharding() -> None:
    """Covers dtypes of their own, and keep_dtype."""
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
    model, expected = sharded_net()
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
    for model, expected in (
        sharded_net(offload_policy=CPUOffloadPolicy(pin_memory=True)),
        sharded_net1(cpu_offload=CPUOffload(offload_params=True)),
    ):
        actual = extracted(model, dtype=torch.bfloat16, keep_dtype=(*INTEGERS, "sc*"))
        assert_same(actual, cast_of(expected, torch.bfloat16, "scale"))


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
def test_weights_info_is_what_full_tensors_yields() -> None:
    bfloat16 = {"dtype": torch.bfloat16, "keep_dtype": (*INTEGERS, "scale")}
    for model in (fsdp2(new_net()), fsdp1(new_net(empty=False)), new_net().to(this_device())):
        for options in ({}, bfloat16, {"bucket_bytes": 64 << 10}):
            asked = {key: value for key, value in options.items() if key != "bucket_bytes"}
            info = [(name, one.shape, one.dtype) for name, one in weights_info(model, **asked).items()]
            assert info == [(name, one.shape, one.dtype) for name, one in full_tensors(model, **options)]


@everywhere
def test_weights_info_needs_no_other_rank() -> None:
    """The others wait for the one rank; in a collective they would meet it in the wrong one."""
    model = fsdp2(new_net())
    if this_rank() == 1:
        assert sorted(weights_info(model)) == sorted(new_net().state_dict())
    together()
    assert len(extracted(model)) == len(new_net().state_dict())


@everywhere
def test_full_state_dict_is_on_the_cpu_of_rank_0_or_all() -> None:
    cpu = torch.device("cpu")
    for model, expected in (sharded_net(), sharded_net1()):
        for options in ({}, {"bucket_bytes": 64 << 10}):
            state = full_state_dict(model, **options)
            assert_same(state, expected if this_rank() == 0 else {}, cpu)
            state = full_state_dict(model, ranks="all", **options)
            assert_same(state, expected, cpu)
            assert state["embed.weight"] is state["head.weight"]
            assert not any(tensor.is_pinned() for tensor in state.values())
        cast = full_state_dict(model, ranks="all", dtype=torch.bfloat16, keep_dtype=INTEGERS)
        assert_same(cast, cast_of(expected, torch.bfloat16), cpu)


class Wide(nn.Module):
    """80 MiB in tensors of 2 MiB and one of 8, with small ones between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 1024) for _ in range(36))
        self.head = nn.Linear(1024, 2048)


@on_the_device
def test_device_memory_stays_within_two_buckets_and_a_tensor() -> None:
    bucket, largest = 4 * MIB, 8 * MIB
    builders: dict[str, Callable[[], nn.Module]] = {
        "fsdp2": lambda: fully_shard(Wide().to(this_device()), mesh=mesh_over()),
        "fsdp2 with a policy": lambda: fully_shard(
            Wide().to(this_device()), mesh=mesh_over(), offload_policy=CPUOffloadPolicy(pin_memory=True)
        ),
        "fsdp1": lambda: FullyShardedDataParallel(Wide(), device_id=this_device(), use_orig_params=True),
    }
    for name, build in builders.items():
        model = build()
        gc.collect()
        accelerator().synchronize()
        before = accelerator().memory_allocated()
        accelerator().reset_peak_memory_stats()
        total = 0
        for _, tensor in full_tensors(model, bucket_bytes=bucket):
            total += tensor.cpu().nbytes
            del tensor
        used = accelerator().max_memory_allocated() - before
        assert total > 64 * MIB
        assert used >= largest, f"{name}: {used} bytes cannot be"
        assert used <= 2 * bucket + largest, f"{name}: {used / MIB:.1f} MiB at once"
        assert accelerator().memory_allocated() == before, f"{name}: memory is not given back"
