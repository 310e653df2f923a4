"""A rank whose device has no more memory: all are told, before or after its promise, and nothing is kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from support.extraction import (
    FEW_BYTES,
    INTEGERS,
    SECONDS_TO_NOTICE,
    adapted,
    assert_same,
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
)
from support.ranks import accelerator, of_all_ranks, this_device, this_rank, together
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard

from fsdp_doctor import RankLeft, full_tensors
from fsdp_doctor.weights.extract import lora
from fsdp_doctor.weights.extract.full import Pipeline
from fsdp_doctor.weights.transport.loader import Loader


@contextlib.contextmanager
def _no_memory_after_the_promise(*, from_bucket: int = 0) -> Iterator[None]:
    """Makes every allocation fail between a rank's promise of a bucket and the end of its collectives."""
    agree, gather, load = Pipeline._agree, Pipeline._gather, Pipeline._load
    device = accelerator()

    def agreed(self: Any) -> None:
        agree(self)
        if self._num_launched >= from_bucket:
            device.set_memory_limit(device.memory_allocated())

    def gathered(self: Any, transfers: Any, deltas: Any) -> Any:
        done = gather(self, transfers, deltas)
        if any(transfers is pending.transfers for pending in self._pending):
            device.set_memory_limit(None)
        return done

    def loaded(self: Any, bucket: Any) -> None:
        device.set_memory_limit(None)
        load(self, bucket)

    try:
        with mock.patch.multiple(Pipeline, _agree=agreed, _gather=gathered, _load=loaded):
            yield
    finally:
        device.set_memory_limit(None)


@on_the_device
def test_nothing_is_allocated_between_a_ranks_promise_and_the_collectives() -> None:
    for model in (
        fsdp2(new_net()),
        fsdp2(new_net(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
        fsdp1(new_net(empty=False)),
    ):
        for options in ({}, {"bucket_bytes": 64 << 10}, {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}):
            expected = extracted(model, **options)
            with _no_memory_after_the_promise():
                assert_same(extracted(model, **options), expected)


@on_the_device
def test_a_merge_without_memory_on_one_rank_leaves_no_rank_waiting() -> None:
    """The factors have memory before the rank promises; the products are computed after that."""
    pytest.importorskip("peft")
    for model in (shard_qwen2(adapted()), shard_qwen1(adapted())):
        expected = extracted(model, bucket_bytes=1 << 16)
        for place in (0, 2):
            together()
            failing = _no_memory_after_the_promise(from_bucket=place) if this_rank() == 0 else contextlib.nullcontext()
            with failing, raised_by(0, torch.OutOfMemoryError):
                extracted(model, bucket_bytes=1 << 16)
            assert_same(extracted(model, bucket_bytes=1 << 16), expected)


@on_the_device
def test_tensors_that_one_rank_could_not_merge_appear_elsewhere_only_as_nan() -> None:
    pytest.importorskip("peft")
    model = shard_qwen2(adapted())
    expected = extracted(model)
    together()
    if this_rank() == 0:
        failing = mock.patch.object(lora.Delta, "compute_part", side_effect=torch.OutOfMemoryError("there is no more"))
        with failing, raises_soon(torch.OutOfMemoryError):
            extracted(model)
    else:
        with raises_soon(RankLeft, "rank 0 left after 1 bucket:"):
            for name, tensor in full_tensors(model):
                same = tensor == expected[name]
                assert (same | tensor.isnan()).all(), name
    assert_same(extracted(model), expected)


@on_the_device
def test_a_redistribution_without_memory_on_one_rank_leaves_no_rank_waiting() -> None:
    """torch allocates in the midst of its collectives: whether there is so much is tried before."""
    net = nn.Linear(256, 256, bias=False).to(this_device())
    model = fully_shard(net, mesh=mesh_over(), shard_placement_fn=lambda _: Shard(1))
    expected = extracted(model)
    together()
    device, try_room = accelerator(), Pipeline._try_room

    def limited(self: Any, transfers: Any) -> None:
        device.set_memory_limit(device.memory_allocated() + 200 * 1024)
        try_room(self, transfers)

    with (
        mock.patch.object(Pipeline, "_try_room", limited) if this_rank() else contextlib.nullcontext(),
        raised_by(1, torch.OutOfMemoryError),
    ):
        extracted(model)
    device.set_memory_limit(None)
    assert_same(extracted(model), expected)


@on_the_device
def test_a_bucket_launched_after_a_failure_gets_the_failed_ones_memory() -> None:
    """The memory suffices for two buckets: the second fails halfway, with what it has been given so far."""
    device, load = accelerator(), Pipeline._load
    for model in _unequal():
        expected = extracted(model)
        together()
        with contextlib.ExitStack() as stack:
            if this_rank() == 1:
                held: list[int] = []

                def failing(self: Any, bucket: Any, held: list[int] = held) -> None:
                    if self._num_launched == 2 and not held:
                        held.append(device.memory_allocated())
                        begun = [transfer.begin(self._call) for transfer in bucket.transfers]
                        raise torch.OutOfMemoryError(f"there is no more for the rest of {len(begun)}")
                    if held:
                        assert device.memory_allocated() <= held[0]
                        held.append(device.memory_allocated())
                    load(self, bucket)

                stack.enter_context(mock.patch.object(Pipeline, "_load", failing))
            with raised_by(1, torch.OutOfMemoryError, "there is no more"):
                for _ in full_tensors(model, bucket_bytes=60 << 10):
                    pass
        if this_rank() == 1:
            assert len(held) > 1
        assert_same(extracted(model), expected)


class _Unequal(nn.Module):
    """Tensors of 24 to 400 KiB: some are larger than a bucket, and than what comes before them."""

    def __init__(self) -> None:
        super().__init__()
        rows = (100, 100, 104, 96, 100, 1600, 100, 100, 300, 100, 100, 100, 900, 100, 400)
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(count, 64)) for count in rows)


def _unequal() -> Iterator[nn.Module]:
    pageable = CPUOffloadPolicy(pin_memory=False)
    yield fully_shard(_Unequal().to(this_device()), mesh=mesh_over())
    yield fully_shard(_Unequal().to(this_device()), mesh=mesh_over(), offload_policy=pageable)
    yield fully_shard(_Unequal().to(this_device()), mesh=mesh_over(), shard_placement_fn=lambda _: Shard(1))
    for use_orig_params in (False, True):
        yield FullyShardedDataParallel(_Unequal(), device_id=this_device(), use_orig_params=use_orig_params)


@on_the_device
def test_memory_taken_while_the_caller_has_a_tensor_leaves_no_rank_waiting() -> None:
    """The memory taken is all that is free, at any tensor: the promised buckets have that of tensors given back."""
    for model in _unequal():
        for options in ({"bucket_bytes": 60 << 10}, {"bucket_bytes": 60 << 10, "dtype": torch.bfloat16}):
            expected = extracted(model, **options)
            found = []
            for place in range(len(expected)):
                together()
                found.append(_ended(model, options, expected, place))
                together()
            endings = of_all_ranks(found)
            assert any(endings[1]), "rank 1 had enough memory wherever the others took theirs"
            for others, own in zip(*endings, strict=True):
                assert own.startswith("OutOfMemoryError: emulated out of memory") if own else not others
                assert not own or others.startswith("RankLeft: rank 1 left after ")
                assert not own or "OutOfMemoryError: emulated out of memory" in others
            assert_same(extracted(model, **options), expected)


def _ended(model: nn.Module, options: dict[str, Any], expected: dict[str, torch.Tensor], place: int) -> str:
    """Returns what an extraction raises in which rank 1 has no more memory from the tensor at that place on."""
    device = accelerator()
    begin = time.monotonic()
    try:
        for index, (name, tensor) in enumerate(full_tensors(model, **options)):
            assert torch.equal(tensor.cpu(), expected[name].cpu()), name
            del tensor
            if index == place and this_rank() == 1:
                device.set_memory_limit(device.memory_allocated())
    except (RankLeft, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        device.set_memory_limit(None)
        assert time.monotonic() - begin < SECONDS_TO_NOTICE
    return ""


@everywhere
def test_a_leaving_rank_fills_with_nan_or_zero_what_it_cannot_load() -> None:
    """The buckets that the rank has promised are launched, whatever it fails with, and however often."""
    begin = Loader.begin
    models = [(fsdp2(new_net()), {}), (fsdp2(new_net()), {"dtype": torch.bfloat16, "keep_dtype": INTEGERS})]
    models += [(fsdp1(new_net(empty=False)), {"dtype": torch.bfloat16, "keep_dtype": INTEGERS})]
    for model, options in models:
        expected = extracted(model, **options)
        for place in (0, 1, 2):
            count = 0

            def failing(self: Any, pieces: Any, merged: Any, copies: Any, place: int = place) -> None:
                nonlocal count
                count += 1
                if count > place and this_rank() == 0:
                    self._missing = [piece.target for piece in pieces]
                    raise OSError("what it is loaded from is gone")
                begin(self, pieces, merged, copies)

            together()
            with (
                mock.patch.object(Loader, "begin", failing),
                raised_by(0, OSError, "what it is loaded from is gone"),
            ):
                for name, tensor in full_tensors(model, bucket_bytes=FEW_BYTES, **options):
                    same = tensor == expected[name]
                    assert (same | tensor.isnan() | (tensor == 0)).all(), name
        assert_same(extracted(model, **options), expected)
