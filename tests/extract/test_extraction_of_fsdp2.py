"""Parameters under ``fully_shard`` come out as they were before they were sharded, however they lie."""

from __future__ import annotations

import torch
from support.extraction import (
    EVEN,
    FEW_BYTES,
    INTEGERS,
    MIB,
    UNEVEN,
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
    train_step,
)
from support.ranks import (
    Setting,
    accelerator,
    on_ranks,
    this_device,
)
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@everywhere
def test_fsdp2_even_and_uneven_rows_are_as_before_sharding() -> None:
    for dims in (EVEN, UNEVEN):
        net = new_net(**dims)
        expected = tensors_of(net)
        model = fsdp2(net)
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
        net = new_net(**dims)
        expected = tensors_of(net)
        model = fsdp2(net, mesh_over(2, 2))
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
            net = new_net(**dims)
            expected = tensors_of(net)
            model = fsdp2(net, offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
            assert model.embed.weight.device.type == "cpu"
            assert model.embed.weight.to_local().is_pinned() == pin_memory
            assert_same(extracted(model), expected)
            assert_same(extracted(model, bucket_bytes=FEW_BYTES), expected)
            assert model.embed.weight.device.type == "cpu"
            train_step(model)


@on_the_device
def test_a_model_moved_to_the_cpu_by_hand_is_gathered_on_the_device() -> None:
    # Of uneven shards that were moved without waiting torch itself makes something else.
    for dims, non_blocking in ((EVEN, False), (UNEVEN, False), (EVEN, True)):
        net = new_net(**dims)
        expected = tensors_of(net)
        model = fsdp2(net)
        model.to("cpu", non_blocking=non_blocking)
        if non_blocking:
            accelerator().synchronize()
        assert_same(extracted(model), expected)
        assert {p.device.type for p in model.parameters()} == {"cpu"}


@on_the_device
def test_a_half_moved_model_is_gathered() -> None:
    """``model.to(device)`` under a pinned policy moves the local tensors and leaves torch's own references behind."""
    net = new_net()
    expected = tensors_of(net)
    model = fsdp2(net, offload_policy=CPUOffloadPolicy(pin_memory=True))
    model.to(this_device())
    assert_same(extracted(model), expected)
    assert_same(extracted(model, dtype=torch.bfloat16, keep_dtype=INTEGERS), cast_of(expected, torch.bfloat16))
