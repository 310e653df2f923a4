"""A fingerprint is the same however the model is sharded, offloaded, cast or merged, and adds up over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from support.extraction import (
    EVEN,
    FEW_BYTES,
    INTEGERS,
    UNEVEN,
    adapted,
    all_trainable,
    everywhere,
    extracted,
    fsdp1,
    fsdp2,
    mesh_over,
    new_net,
    on_the_device,
    qwen,
    raises_soon,
    shard_qwen1,
    shard_qwen2,
    train_step,
)
from support.ranks import Setting, device_type, of_all_ranks, on_ranks, this_device, this_rank, together, world_size
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_doctor import (
    FingerprintError,
    Fingerprints,
    FingerprintSums,
    PlanMismatch,
    RankLeft,
    RepeatedFingerprint,
    RepeatedFingerprintOfTensors,
    TensorPart,
    combine_fingerprints,
    fingerprint,
    fingerprint_tensors,
    fingerprint_variants,
    full_tensors,
)
from fsdp_doctor.weights.fingerprints.block_sums import BlockSums

BF16 = {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}


def assert_equal(actual: Fingerprints, expected: Fingerprints) -> None:
    actual.require_whole("actual")
    assert list(actual.tensors) == list(expected.tensors) or set(actual.tensors) == set(expected.tensors)
    differing = [name for name, one in actual.tensors.items() if one != expected.tensors[name]]
    assert not differing, differing
    assert sorted(actual.tied) == sorted(expected.tied)


def taken(model: nn.Module, **options: Any) -> Fingerprints:
    """Sums the shards where they lie, as a sync does on their way."""
    trained = RepeatedFingerprint(model, **options)
    for _ in range(2):
        names = [name for name, _ in trained.full_tensors()]
        found = trained.read()
        assert names == list(found.tensors)
    assert_equal(found, expected := fingerprint(model, **options))
    return expected


@everywhere
def test_a_default_device_or_dtype_changes_no_fingerprint() -> None:
    model = fsdp2(new_net())
    expected = fingerprint(model)
    try:
        torch.set_default_dtype(torch.float64)
        for device in ("meta", "cpu"):
            torch.set_default_device(device)
            assert_equal(fingerprint(model), expected)
            assert fingerprint_tensors(full_tensors(model)).tensors == expected.tensors
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@everywhere
def test_a_rank_without_memory_for_the_sums_leaves_no_rank_waiting() -> None:
    model = fsdp2(new_net())
    expected, failing = fingerprint(model), torch.OutOfMemoryError("there is no more")
    without = mock.patch.object(FingerprintSums, "rows", side_effect=failing)
    for call in (lambda: fingerprint(model), lambda: fingerprint_variants(model, ["large.weight"])):
        together()
        with (
            without if this_rank() == 0 else contextlib.nullcontext(),
            raises_soon(RankLeft if this_rank() else torch.OutOfMemoryError, "there is no more"),
        ):
            call()
        assert_equal(fingerprint(model), expected)


@everywhere
def test_fsdp2_has_the_fingerprint_of_the_unsharded_model() -> None:
    for dims in (EVEN, UNEVEN):
        expected = fingerprint(new_net(**dims))
        assert len(expected.tensors) == len(new_net(**dims).state_dict())
        model = fsdp2(new_net(**dims))
        for options in ({}, {"bucket_bytes": FEW_BYTES}):
            assert_equal(taken(model, **options), expected)
        assert_equal(taken(model, **BF16), fingerprint(new_net(**dims), **BF16))
        assert_equal(fingerprint_tensors(extracted(model, **BF16)), fingerprint(model, **BF16))


@on_the_device
def test_fsdp1_has_the_fingerprint_of_the_unsharded_model() -> None:
    for dims in ({**EVEN, "empty": False}, {**UNEVEN, "empty": False}):
        for use_orig_params in (True, False):
            expected = fingerprint(new_net(**dims))
            options = {"use_orig_params": use_orig_params}
            assert_equal(taken(fsdp1(all_trainable(new_net(**dims)), **options)), expected)
            offloaded = fsdp1(all_trainable(new_net(**dims)), cpu_offload=CPUOffload(offload_params=True), **options)
            assert_equal(taken(offloaded, **BF16), fingerprint(new_net(**dims), **BF16))


@on_the_device
def test_a_parameter_transposed_in_memory_has_the_fingerprint_of_its_values() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        plain = nn.Linear(23, 31)
        plain.weight = nn.Parameter(torch.randn(23, 31).t())
        return plain

    expected = fingerprint(net())
    for use_orig_params in (True, False):
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrapped = FullyShardedDataParallel(net(), device_id=this_device(), use_orig_params=use_orig_params)
        assert_equal(taken(wrapped), expected)


@on_the_device
def test_shards_on_the_host_and_half_moved_ones_have_the_same_fingerprint() -> None:
    expected = fingerprint(new_net())
    model = fsdp2(new_net(), offload_policy=CPUOffloadPolicy())
    assert_equal(taken(model), expected)
    model.to(this_device())
    assert_equal(taken(model, bucket_bytes=FEW_BYTES), expected)
    assert_equal(taken(fsdp2(new_net()).to("cpu")), expected)


@on_ranks(Setting("cpu", 4))
def test_any_mesh_and_placement_has_the_same_fingerprint() -> None:
    expected = fingerprint(new_net(**EVEN))
    assert_equal(taken(fsdp2(new_net(**EVEN), mesh_over(2, 2))), expected)
    net = new_net(**EVEN)
    columns = {p for p in net.parameters() if p.ndim == 2 and p.shape[1] == 12}
    assert columns
    by_columns = fsdp2(net, shard_placement_fn=lambda p: Shard(1) if p in columns else None)
    assert any(isinstance(p, DTensor) and p.placements == (Shard(1),) for p in by_columns.parameters())
    assert_equal(taken(by_columns), expected)


@on_ranks(Setting("cpu", 4))
def test_tensor_parallel_shards_have_the_same_fingerprint() -> None:
    for width, hidden in ((16, 32), (8, 20), (6, 15)):

        def net(width: int = width, hidden: int = hidden) -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width))

        expected = fingerprint(net())
        mesh = mesh_over(2, 2)
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallel = parallelize_module(net(), mesh["inner"], plan)
        assert_equal(taken(parallel), expected)
        assert_equal(taken(fully_shard(parallel, mesh=mesh["outer"])), expected)
        own = fingerprint(parallel, combined=False)
        assert_equal(combine_fingerprints(of_all_ranks(own)), expected)


@everywhere
def test_the_parts_of_all_ranks_combine_to_the_whole() -> None:
    expected = fingerprint(new_net())
    own = fingerprint(fsdp2(new_net()), combined=False)
    with_parts = [name for name, one in own.tensors.items() if not one.is_whole]
    assert with_parts
    assert_equal(combine_fingerprints(of_all_ranks(own)), expected)


@on_the_device
def test_merged_adapters_are_in_the_fingerprint_as_in_the_full_tensors() -> None:
    for shard in (shard_qwen2, shard_qwen1):
        for lora in ("merged", "base", "adapter"):
            model = shard(adapted())
            for dtype in (None, torch.bfloat16):
                streamed = fingerprint_tensors(full_tensors(model, dtype=dtype, lora=lora))
                assert taken(model, dtype=dtype, lora=lora).tensors == streamed.tensors
    plain = shard_qwen2(qwen())
    assert fingerprint(plain).tensors == fingerprint(shard_qwen2(adapted()), lora="base").tensors
    assert fingerprint(plain).tensors != fingerprint(shard_qwen2(adapted()), lora="merged").tensors


@everywhere
def test_the_fingerprints_of_a_sync_take_few_launches_and_no_wait() -> None:
    """A row for each tensor is set to zero, then summed; no table is made again where nothing is copied."""
    cast = {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}
    for options, is_kept in (({}, True), (cast, False)):
        model = fsdp2(new_net(**EVEN))
        held = dict(full_tensors(model, **options))
        trained = RepeatedFingerprint(model, **options)
        received = RepeatedFingerprintOfTensors(held)
        trained.start()
        for _ in range(2):
            train_step(model)
            expected = fingerprint(model, **options)
            for name, tensor in full_tensors(model, **options):
                held[name].copy_(tensor)
            with _noted_launches() as launches:
                trained.start()
                received.start()
            train_step(model)
            assert_equal(trained.read(), expected)
            assert received.read().tensors == expected.tensors
            trainers = ["aten.copy_.default", "sum", "aten.empty.memory_format", "c10d.allreduce_.default"]
            receivers = ["aten.copy_.default", "sum"]
            assert launches == [*trainers, "aten.copy_.default", *receivers] or not is_kept
            assert launches[-2:] == receivers


@on_the_device
def test_the_proof_of_an_offloaded_sync_crosses_the_link_no_second_time() -> None:
    for options in ({}, {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}):
        model = fsdp2(new_net(), offload_policy=CPUOffloadPolicy())
        held = {name: tensor.clone() for name, tensor in full_tensors(model, **options)}
        with _noted_launches() as alone:
            for name, tensor in full_tensors(model, **options):
                held[name].copy_(tensor)
        trained, received = RepeatedFingerprint(model, **options), RepeatedFingerprintOfTensors(held)
        for _ in range(2):
            with _noted_launches() as launches:
                for name, tensor in trained.full_tensors():
                    held[name].copy_(tensor)
                received.start()
            assert launches.count("sum") == 2
            assert trained.read().tensors == received.read().tensors == fingerprint(model, **options).tensors
        assert launches.crossing_bytes == alone.crossing_bytes > 0


class _Launches(list[str]):
    """crossing_bytes: of what was copied from the host to the device."""

    crossing_bytes = 0


@contextlib.contextmanager
def _noted_launches() -> Iterator[_Launches]:
    """Every operation on a tensor inside, of which a sum of blocks is one."""
    noted = _Launches()
    add, make = BlockSums.add, BlockSums.__init__

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view:
                noted.append(str(func))
            result = func(*args, **(kwargs or {}))
            if str(func).startswith(("aten.copy_.", "aten._foreach_copy_.", "aten._to_copy.")):
                sources = args[1] if func._schema.is_mutable else args[0]
                targets = args[0] if func._schema.is_mutable else result
                for target, source in zip(pytree.tree_leaves(targets), pytree.tree_leaves(sources), strict=True):
                    if source.device.type == "cpu" != target.device.type:
                        noted.crossing_bytes += source.nbytes
            return result

    mode = Noting()

    def noted_add(self: BlockSums, into: torch.Tensor) -> None:
        before = len(noted)
        add(self, into)
        noted[before:] = ["sum"]

    def noted_table(self: BlockSums, *arguments: Any) -> None:
        noted.append("table")
        make(self, *arguments)

    with mock.patch.object(BlockSums, "add", noted_add), mock.patch.object(BlockSums, "__init__", noted_table), mode:
        yield noted


@everywhere
def test_shards_and_tensors_that_moved_are_summed_where_they_are() -> None:
    model = fsdp2(new_net())
    trained = RepeatedFingerprint(model)
    trained.start()
    expected = trained.read()
    if device_type() != "cpu":
        model.to("cpu")
        trained.start()
        assert_equal(trained.read(), expected)
        model.to(this_device())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    trained.start()
    assert_equal(trained.read(), fingerprint(model))
    weight = torch.nn.Parameter(torch.ones(5, device=this_device()))
    received = RepeatedFingerprintOfTensors({"a": weight})
    weight.data = torch.full((5,), 2.0, device=this_device())
    received.start()
    assert received.read() == fingerprint_tensors({"a": torch.full((5,), 2.0)})


@everywhere
def test_an_engines_shards_and_slices_have_the_trainers_names() -> None:
    """Each rank of the engine holds its rows of q, k, v and of gate and up, fused, and its columns of the others."""
    size, rank = world_size(), this_rank()
    heads, hidden = 4 * size, 6 * size
    torch.manual_seed(0)
    names = ("q", "k", "v", "gate", "up", "down")
    trainer = {name: torch.randn(heads, hidden).bfloat16() for name in names} | {"norm": torch.randn(hidden)}
    own = slice(rank * heads // size, (rank + 1) * heads // size)
    qkv = torch.cat([trainer[name][own] for name in ("q", "k", "v")]).to(this_device())
    gate_up = torch.cat([trainer[name][own] for name in ("gate", "up")]).to(this_device())
    columns = slice(rank * hidden // size, (rank + 1) * hidden // size)
    shape, rows = (heads, hidden), heads // size

    def engine(gate: int, up: int) -> Fingerprints:
        parts: list[tuple[str, torch.Tensor | TensorPart]] = [
            (name, TensorPart(qkv[at * rows : (at + 1) * rows], shape, (own.start, 0)))
            for at, name in enumerate(("q", "k", "v"))
        ]
        halves = gate_up.split(rows)
        parts.append(("gate", TensorPart(halves[gate], shape, (own.start, 0))))
        parts.append(("up", TensorPart(halves[up], shape, (own.start, 0))))
        parts.append(("down", TensorPart(trainer["down"][:, columns].to(this_device()), shape, (0, columns.start))))
        parts.append(("norm", trainer["norm"].to(this_device())))
        return combine_fingerprints(of_all_ranks(fingerprint_tensors(parts)))

    expected = fingerprint_tensors(trainer)
    assert engine(0, 1).tensors == expected.tensors
    swapped = engine(1, 0).tensors
    assert {name for name in expected.tensors if swapped[name] != expected.tensors[name]} == {"gate", "up"}


@everywhere
def test_ranks_with_other_models_or_arguments_are_told_and_none_waits() -> None:
    with raises_soon(PlanMismatch, "the ranks do not extract the same"):
        fingerprint(fsdp2(new_net()), dtype=torch.bfloat16 if this_rank() else torch.float16, keep_dtype=INTEGERS)
    with raises_soon(RankLeft if this_rank() else ValueError, "lora"):
        fingerprint(fsdp2(new_net()), lora="merged" if this_rank() else "other")  # type: ignore[arg-type]
    assert_equal(fingerprint(fsdp2(new_net())), fingerprint(new_net()))


@everywhere
def test_what_several_ranks_hold_whole_must_be_the_same_on_them() -> None:
    everyone = of_all_ranks(fingerprint_tensors({"norm": torch.full((3,), float(this_rank()))}))
    with raises_soon(FingerprintError, "norm", "several ranks hold the elements"):
        combine_fingerprints(everyone)


@on_ranks(Setting("emulated", 2), Setting("cpu", 4))
def test_variants_are_those_of_the_unsharded_model_however_it_is_sharded() -> None:
    names = ["layers.0.up.weight", "layers.1.down.weight", "large.weight", "layers.0.gate", "head.weight"]

    def net() -> nn.Module:
        return all_trainable(new_net(**EVEN, empty=False))

    expected = fingerprint_variants(net(), names, **BF16)
    assert sorted(expected) == sorted(names)
    models = [fsdp2(net()), fsdp2(net(), shard_placement_fn=lambda p: Shard(1) if p.shape[-1:] == (512,) else None)]
    if device_type() == "emulated":
        models += [fsdp1(net(), use_orig_params=use_orig_params) for use_orig_params in (True, False)]
    for model in models:
        found = fingerprint_variants(model, names, **BF16)
        assert {name: set(many) for name, many in found.items()} == {name: set(many) for name, many in expected.items()}
