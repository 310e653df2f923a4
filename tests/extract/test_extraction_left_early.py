"""A rank that leaves inside of a window of buckets carries out what it has promised, and the others are told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.extraction import (
    Many,
    assert_same,
    extracted,
    fsdp2,
    new_net,
    on_the_device,
    raises_soon,
    shard_qwen2,
)
from support.ranks import Setting, on_ranks, this_device, this_rank, together, world_size
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_doctor import RankLeft, full_tensors
from fsdp_doctor.extract import agreement, pipeline
from fsdp_doctor.extract.kept_plans import Arguments, plan_of

on_four = on_ranks(Setting("emulated", 2), Setting("cpu", 4))


FEW_BYTES = 128


def num_buckets(model: nn.Module, bucket_bytes: int = FEW_BYTES) -> int:
    return len(plan_of(model, Arguments.given(None, None, (), bucket_bytes, "merged"))[0].buckets)


def _builds() -> Iterator[tuple[nn.Module, int]]:
    """(model, bytes of a bucket of which it has some ten)."""
    yield fsdp2(new_net()), FEW_BYTES
    for use_orig_params in (True, False):
        yield FullyShardedDataParallel(Many(), device_id=this_device(), use_orig_params=use_orig_params), 1 << 16


@on_four
def test_a_consumer_that_raises_at_the_first_a_middle_or_the_last_tensor_leaves_no_rank_waiting() -> None:
    leaver = world_size() - 1
    for model, nbytes in _builds():
        expected = extracted(model)
        assert num_buckets(model, nbytes) > 8
        for place in (0, 1, len(expected) // 2, len(expected) - 1):
            together()
            with raises_soon(ZeroDivisionError if this_rank() == leaver else RankLeft, *_said(leaver)):
                for index, (name, tensor) in enumerate(full_tensors(model, bucket_bytes=nbytes)):
                    assert torch.equal(tensor.cpu(), expected[name].cpu()), name
                    if this_rank() == leaver and index == place:
                        raise ZeroDivisionError
            assert_same(extracted(model, bucket_bytes=nbytes), expected)


def _said(leaver: int) -> tuple[str, ...]:
    return () if this_rank() == leaver else (f"rank {leaver} left after ", "its caller stopped")


@on_four
def test_a_bucket_that_fails_on_one_rank_first_middle_or_last_leaves_no_rank_waiting() -> None:
    """As where the device has no more memory: it is asked for once more, for the others' sake."""
    leaver = world_size() - 1
    model = fsdp2(new_net())
    expected = extracted(model)
    buckets = num_buckets(model)
    for place in (0, buckets // 2, buckets - 1):
        together()
        if this_rank() == leaver:
            with _fails_once_at(place), raises_soon(torch.OutOfMemoryError, "no more"):
                extracted(model, bucket_bytes=FEW_BYTES)
        else:
            with raises_soon(RankLeft, f"rank {leaver} left", "no more"):
                extracted(model, bucket_bytes=FEW_BYTES)
        assert_same(extracted(model, bucket_bytes=FEW_BYTES), expected)


def _fails_once_at(place: int) -> Any:
    load, count = pipeline.Pipeline._load, 0

    def failing(self: Any, bucket: Any) -> None:
        nonlocal count
        count += 1
        if count == place + 1:
            raise torch.OutOfMemoryError("there is no more")
        load(self, bucket)

    return mock.patch.object(pipeline.Pipeline, "_load", failing)


@on_the_device
def test_a_rank_that_leaves_while_adapters_are_merged_leaves_no_rank_waiting() -> None:
    pytest.importorskip("peft")
    from support.extraction import adapted

    model = shard_qwen2(adapted())
    expected = extracted(model)
    for place in (0, 7, len(expected) - 1):
        together()
        with raises_soon(ZeroDivisionError if this_rank() == 1 else RankLeft, *_said(1)):
            for index, _ in enumerate(full_tensors(model, bucket_bytes=1 << 16)):
                if this_rank() == 1 and index == place:
                    raise ZeroDivisionError
        assert_same(extracted(model), expected)


@on_the_device
def test_a_rank_without_memory_for_the_largest_of_a_window_gives_its_word_for_one_bucket_at_a_time() -> None:
    model = fsdp2(new_net())
    expected = extracted(model)
    promised = []
    promise = agreement.Agreement.promise

    def noted(self: Any, num_buckets: int, *, one_only: bool) -> int:
        promised.append(promise(self, num_buckets, one_only=one_only))
        return promised[-1]

    def without_room(self: Any, buckets: Any) -> None:
        if buckets and this_rank() == 0:
            raise torch.OutOfMemoryError("there is no more")

    with mock.patch.object(agreement.Agreement, "promise", noted):
        with mock.patch.object(pipeline.Pipeline, "_keep_spare", without_room):
            assert_same(extracted(model, bucket_bytes=FEW_BYTES), expected)
        assert promised == [1] * num_buckets(model)
        promised.clear()
        assert_same(extracted(model, bucket_bytes=FEW_BYTES), expected)
        assert promised[:3] == [1, 2, 4]


@on_the_device
def test_a_call_asks_the_store_a_few_times_however_many_buckets_there_are() -> None:
    model = fsdp2(new_net())
    extracted(model, bucket_bytes=FEW_BYTES)
    buckets = num_buckets(model)
    requests = []
    store = agreement._connection(agreement.private.default_store())

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: (requests.append(name), getattr(store, name)(*arguments))[1]

    with mock.patch.object(agreement, "_connection", return_value=Counting()):
        extracted(model, bucket_bytes=FEW_BYTES)
    # Two for each window and for the end, what the rank that comes first deletes, and the asking before a thread waits.
    assert len(requests) <= 8 * (buckets.bit_length() + 1) + 4, requests


@on_the_device
def test_a_thread_waits_only_for_ranks_that_do_not_come_soon() -> None:
    model = fsdp2(new_net())
    expected = extracted(model)
    answered = mock.patch.object(agreement.Agreement, "_is_answered_soon", return_value=True)
    with mock.patch.object(agreement, "interruptible") as waiting, answered:
        assert_same(extracted(model), expected)
    assert not waiting.called
    come = agreement.Agreement._came_to_stage

    def late(self: Any, one_only: bool) -> int:
        if this_rank() == 1 and not self._stage:
            together()
        return come(self, one_only)

    def waited(wait: Any) -> Any:
        if this_rank() == 0 and waiting.call_count == 1:
            together()
        return wait()

    with (
        mock.patch.object(agreement.Agreement, "_came_to_stage", late),
        mock.patch.object(agreement, "interruptible", side_effect=waited) as waiting,
    ):
        # Rank 1 comes to the first stage once rank 0 has begun to wait in a thread.
        assert_same(extracted(model), expected)


@on_ranks(Setting("cpu", 3), last_of_its_ranks=True)
def test_without_its_store_a_call_ends_in_a_sentence() -> None:
    model = fsdp2(new_net())
    extracted(model)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    del server
    with (
        mock.patch.object(agreement, "_connection", return_value=client),
        raises_soon(RankLeft, "the process that has the process group's store has ended, or cannot be reached"),
    ):
        extracted(model)
