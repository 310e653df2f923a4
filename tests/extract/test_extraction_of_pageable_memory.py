"""Shards in pageable memory: threads read them into pinned chunks, as far as both are to be had."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from support.extraction import INTEGERS, assert_same, cast_of, extracted, fsdp2, new_net, on_the_device, raises_soon
from support.ranks import accelerator, this_device, this_rank, together
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_doctor.extract import host_copies
from fsdp_doctor.extract.streams import Streams

ROWS = {"large_rows": 9001}


def _offloaded() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Of which each rank has 9 MiB, in pageable memory."""
    model = fsdp2(new_net(**ROWS))
    expected = extracted(model)
    model.to("cpu")
    return model, expected


@on_the_device
def test_pageable_shards_are_read_by_eight_threads_at_most_through_little_pinned_memory() -> None:
    model, expected = _offloaded()
    threads: set[int] = set()
    pinned: list[int] = []
    read, empty = host_copies._read, torch.empty

    def noted_read(batch: Any, chunks: Any) -> None:
        threads.add(threading.get_ident())
        read(batch, chunks)

    def noted_empty(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*arguments, **options)
        if options.get("pin_memory"):
            pinned.append(tensor.nbytes)
        return tensor

    with mock.patch.object(host_copies, "_read", noted_read), mock.patch.object(torch, "empty", noted_empty):
        assert_same(extracted(model, bucket_bytes=4 << 20), expected)
    assert 1 <= len(threads) <= 8
    assert threading.get_ident() not in threads
    assert 0 < sum(pinned) <= 512 << 20
    assert not [thread for thread in threading.enumerate() if thread.ident in threads]


@on_the_device
def test_what_counts_as_read_is_referred_to_by_no_thread() -> None:
    """Not even by one that loses the processor right after it has said so: there it waits for the test."""
    go_on = threading.Event()

    class Paused(host_copies._Submission):
        def carried(self) -> None:
            super().carried()
            go_on.wait()

    before = accelerator().memory_allocated()
    with mock.patch.object(host_copies, "_Submission", Paused):
        copies = host_copies.HostCopies(Streams(this_device()))
        target = torch.empty(4 << 20, dtype=torch.uint8, device=this_device())
        copies.copy(host_copies.InMemory(torch.ones(4 << 20, dtype=torch.uint8)), target)
        copies.finish()
        del target
        held = accelerator().memory_allocated() - before
        go_on.set()
        copies.close()
    assert held == 0


@on_the_device
def test_without_threads_or_with_less_pinned_memory_the_values_are_the_same() -> None:
    """On one rank alone, too."""
    model, expected = _offloaded()
    half = {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}
    for missing in (_threads(0), _threads(1), _pinned(0), _pinned(2), [*_threads(0), *_pinned(0)]):
        with ExitStack() as stack:
            if this_rank() == 0:
                for patch in missing:
                    stack.enter_context(patch)
            assert_same(extracted(model, bucket_bytes=4 << 20), expected)
            assert_same(extracted(model, **half), cast_of(expected, torch.bfloat16))


def _threads(most: int) -> list[Any]:
    """As where the system starts no more than so many."""
    start, started = threading.Thread.start, iter(range(1 << 30))

    def limited(self: threading.Thread) -> None:
        if next(started) >= most:
            raise RuntimeError("can't start new thread")
        start(self)

    return [mock.patch.object(host_copies.threading.Thread, "start", limited)]


def _pinned(most: int) -> list[Any]:
    """As where the system pins no more than so many chunks."""
    empty, pinned = torch.empty, iter(range(1 << 30))

    def limited(*arguments: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory") and next(pinned) >= most:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*arguments, **options)

    return [mock.patch.object(torch, "empty", limited)]


@on_the_device
def test_a_policy_that_does_not_pin_is_read_by_threads_too() -> None:
    net = new_net(**ROWS)
    expected = extracted(fsdp2(net))
    model = fsdp2(new_net(**ROWS), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert_same(extracted(model), expected)


@on_the_device
def test_a_reader_that_fails_is_the_error_of_the_call() -> None:
    model, expected = _offloaded()

    def failing(batch: Any, chunks: Any) -> Iterator[None]:
        raise OSError("the memory is gone")

    with raises_soon(OSError, "the memory is gone"), mock.patch.object(host_copies, "_read", failing):
        extracted(model)
    together()
    assert_same(extracted(model), expected)


@on_the_device
def test_a_thread_that_cannot_use_its_stream_is_the_error_of_the_call() -> None:
    model, expected = _offloaded()
    with raises_soon(RuntimeError, "no stream"), mock.patch.object(Streams, "of_thread", _no_stream):
        extracted(model)
    together()
    assert_same(extracted(model), expected)


def _no_stream(streams: Streams) -> Any:
    raise RuntimeError("no stream")
