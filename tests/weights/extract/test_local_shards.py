"""Each rank's shards come on the device, cast and merged, with their place in the whole tensor; nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from support.extraction import (
    EVEN,
    FEW_BYTES,
    INTEGERS,
    UNEVEN,
    adapted,
    all_trainable,
    cast_of,
    everywhere,
    extracted,
    fsdp1,
    fsdp2,
    mesh_over,
    new_net,
    on_the_device,
    raised_by,
    raises_soon,
    shard_qwen1,
    shard_qwen2,
    tensors_of,
)
from support.ranks import Setting, on_ranks, this_device, this_rank, together
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_doctor import PlanMismatch, RankLeft, fingerprint, local_shards, weights_info

BF16 = {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}


def assert_shards(model: nn.Module, expected: dict[str, torch.Tensor], **options: object) -> None:
    """Bits, dtypes, shapes and places; and together the ranks have every element of each tensor."""
    info = weights_info(model, **{key: value for key, value in options.items() if key != "bucket_bytes"})  # type: ignore[arg-type]
    names = []
    for name, tensor, shape, place in local_shards(model, **options):  # type: ignore[arg-type]
        names.append(name)
        assert shape == expected[name].shape
        assert tensor.device == this_device()
        assert tensor.dtype == expected[name].dtype == info[name].dtype
        want = place.of(expected[name].cpu())
        assert tensor.numel() == want.numel() == place.numel
        assert torch.equal(tensor.cpu().view(-1), want.reshape(-1)), name
        covered = torch.tensor([tensor.numel()], device=this_device())
        dist.all_reduce(covered)
        assert int(covered) >= expected[name].numel()
    assert names == list(info)


@everywhere
def test_fsdp2_shards_are_the_rows_of_the_model_before_it_was_sharded() -> None:
    for dims in (EVEN, UNEVEN):
        expected = tensors_of(new_net(**dims))
        for offload in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
            model = fsdp2(new_net(**dims), **offload)
            for options in ({}, {"bucket_bytes": FEW_BYTES}, {"bucket_bytes": 1}):
                assert_shards(model, expected, **options)
            assert_shards(model, cast_of(expected, torch.bfloat16), **BF16)


class _WithoutElements(nn.Module):
    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            setattr(self, f"part{index}", nn.Parameter(torch.empty(shape)))


@everywhere
def test_shards_without_elements_have_the_shape_of_the_ranks_part() -> None:
    """FSDP2's own local tensors have no rows there."""
    shapes = ((5, 0), (0, 4), (1, 0), (6, 0, 3), (7, 8))
    model = fully_shard(_WithoutElements(*shapes), mesh=mesh_over())
    for name, tensor, shape, place in local_shards(model):
        assert tensor.shape == place.of(torch.empty(shape)).shape, name
        rows = torch.tensor([tensor.shape[0]], device=this_device())
        dist.all_reduce(rows)
        assert torch.Size((int(rows), *tensor.shape[1:])) == shape, name
    assert [tensor.shape for tensor in extracted(model).values()] == list(shapes)


@on_the_device
def test_half_moved_shards_come_too() -> None:
    expected = tensors_of(new_net())
    model = fsdp2(new_net(), offload_policy=CPUOffloadPolicy())
    model.to(this_device())
    assert_shards(model, expected)


@on_the_device
def test_fsdp1_shards_are_ranges_of_the_model_before_it_was_sharded() -> None:
    for dims in ({**EVEN, "empty": False}, {**UNEVEN, "empty": False}):
        expected = tensors_of(new_net(**dims))
        for use_orig_params in (True, False):
            model = fsdp1(all_trainable(new_net(**dims)), use_orig_params=use_orig_params)
            assert_shards(model, expected)
            assert_shards(model, cast_of(expected, torch.bfloat16), bucket_bytes=FEW_BYTES, **BF16)


@on_ranks(Setting("cpu", 4))
def test_shards_by_columns_of_replicas_and_of_tensor_parallelism_have_their_place() -> None:
    expected = tensors_of(new_net(**EVEN))
    assert_shards(fsdp2(new_net(**EVEN), mesh_over(2, 2)), expected)
    columns = fsdp2(
        new_net(**EVEN), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == 12 else None
    )
    assert_shards(columns, expected)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16))
    expected = tensors_of(net)
    mesh = mesh_over(2, 2)
    parallelize_module(net, mesh["inner"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    assert_shards(fully_shard(net, mesh=mesh["outer"]), expected)


@on_the_device
def test_adapters_are_merged_into_the_shards_as_into_the_full_tensors() -> None:
    for shard in (shard_qwen2, shard_qwen1):
        for lora in ("merged", "base", "adapter"):
            model = shard(adapted())
            assert_shards(model, extracted(model, lora=lora), lora=lora)
        merged = extracted(model, dtype=torch.bfloat16)
        assert_shards(model, merged, dtype=torch.bfloat16, bucket_bytes=FEW_BYTES)


@on_the_device
def test_adapters_are_merged_into_shards_by_columns() -> None:
    def by_columns(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None

    model = shard_qwen2(adapted(), shard_placement_fn=by_columns)
    expected = extracted(model)
    for name, tensor, _, place in local_shards(model):
        torch.testing.assert_close(tensor.cpu(), place.of(expected[name].cpu()).view(tensor.shape))


@everywhere
def test_a_shard_belongs_to_the_caller() -> None:
    model = fsdp2(new_net())
    before = tensors_of(new_net())
    for _, tensor, _, _ in local_shards(model):
        tensor.zero_()
    assert_shards(model, before)


@everywhere
def test_without_adapters_a_rank_needs_no_other() -> None:
    model = fsdp2(new_net())
    if this_rank() == 0:
        assert len(list(local_shards(model))) == len(weights_info(model))
    together()


@on_the_device
def test_a_consumer_that_stops_or_raises_leaves_nobody_waiting() -> None:
    model = shard_qwen2(adapted())

    def consume() -> Iterator[None]:
        for _ in local_shards(model, bucket_bytes=FEW_BYTES):
            yield
            if this_rank() == 0:
                raise KeyError("consumer")

    try:
        list(consume())
    except KeyError:
        assert this_rank() == 0
    with raises_soon(PlanMismatch, "the ranks do not extract the same"):
        list(local_shards(model, bucket_bytes=FEW_BYTES + this_rank()))
    unread = local_shards(model)
    if this_rank() == 0:
        del unread
    else:
        with raises_soon(RankLeft, "rank 0 left"):
            list(unread)
    assert_shards(model, extracted(model))


@everywhere
def test_a_rank_that_is_refused_leaves_nobody_waiting_then_or_later() -> None:
    """The other ranks do not ask for it without adapters; with adapters they are told."""
    model = fsdp2(new_net())
    expected = tensors_of(new_net())
    for call in (local_shards, lambda model, **options: fingerprint(model, combined=False, **options)):
        if this_rank() == 0:
            with raises_soon(ValueError, "lora"):
                call(model, lora="other")  # type: ignore[operator]
        else:
            call(model)  # type: ignore[operator]
        assert_shards(model, expected)
        assert len(extracted(model)) == len(expected)


@on_the_device
def test_a_refusal_of_a_model_with_adapters_leaves_no_rank_waiting() -> None:
    model = shard_qwen2(adapted())
    shards: Callable[..., object] = lambda model, **options: list(local_shards(model, **options))  # noqa: E731
    for path in (shards, fingerprint):
        with raised_by(0, ValueError, "keep_dtype"):
            path(model, keep_dtype=["nothing"] if this_rank() == 0 else [])
        assert_shards(model, extracted(model))
