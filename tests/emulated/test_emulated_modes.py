"""The modes that a program asks for: memory in segments, freed memory poisoned, races between streams told."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from program import python_prints
from support.emulated_device import DEVICE, emulated, pinned

MIB = 2**20


@pytest.fixture(autouse=True)
def poison_off(device_as_it_was: None) -> Iterator[None]:
    yield
    emulated.poison_freed_memory(False)


# In a process of its own: the allocator cannot be changed while there are tensors.
_CACHING = """
import torch, fsdp_doctor.emulated
from torch import emulated
MIB = 2**20
emulated.use_caching_allocator()
def block(mib): return torch.empty(int(mib * MIB), dtype=torch.uint8, device="emulated")
def say():
    kinds = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
    print(*(emulated.memory_stats()[f"{kind}.all.current"] / MIB for kind in kinds))
a = block(0.5); say()
b, c, d = block(4), block(4), block(4); say()
del c; say()
e = block(12); say()
del e; say(); emulated.empty_cache(); say()
emulated.set_memory_limit(30 * MIB)
try: block(11)
except torch.OutOfMemoryError as error: print(error)
"""


def test_memory_is_reserved_in_segments_that_fragment_as_those_of_cuda() -> None:
    lines = python_prints(_CACHING).splitlines()
    assert lines[:-1] == [
        "0.5 2.0 1.5",
        "12.5 22.0 9.5",
        "8.5 22.0 13.5",
        "20.5 34.0 13.5",
        "8.5 34.0 13.5",
        "8.5 22.0 13.5",
    ]
    assert "8.50 MiB is allocated by PyTorch, and 13.50 MiB is reserved by PyTorch but unallocated" in lines[-1]


def test_without_segments_nothing_is_reserved_beyond_what_is_allocated() -> None:
    held = torch.empty(1000, device=DEVICE)
    assert emulated.memory_reserved() == emulated.memory_allocated()
    del held


def copied_on_a_stream_and_freed(record: bool = False, wait: bool = False) -> list[float]:
    """What arrives on the host of a tensor that is freed while a copy on another stream is in flight."""
    side, target = emulated.Stream(), pinned(0, 0)
    source = torch.ones(2, device=DEVICE)
    side.wait_stream(emulated.current_stream())
    with emulated.stream(side):
        target.copy_(source, non_blocking=True)
        if record:
            source.record_stream(side)
    if wait:
        emulated.current_stream().wait_stream(side)
    del source
    side.synchronize()
    return target.tolist()


def test_memory_that_is_freed_while_another_stream_reads_it_is_poisoned() -> None:
    assert copied_on_a_stream_and_freed() == [1, 1]
    emulated.poison_freed_memory()
    assert all(value != value for value in copied_on_a_stream_and_freed())
    assert copied_on_a_stream_and_freed(record=True) == [1, 1]
    assert copied_on_a_stream_and_freed(wait=True) == [1, 1]


def kernels_on_two_streams(wait: bool) -> None:
    side = emulated.Stream()
    tensor = torch.ones(4, device=DEVICE)
    if wait:
        side.wait_stream(emulated.current_stream())
    with emulated.stream(side):
        tensor.mul_(2)
    emulated.synchronize()


def test_two_kernels_on_streams_that_did_not_wait_are_told() -> None:
    with (
        pytest.raises(RuntimeError, match=r"aten::mul_ on stream \d+ .* writes what .* on stream 0 .* writes"),
        emulated.race_detection(),
    ):
        kernels_on_two_streams(wait=False)


def test_kernels_that_something_orders_are_no_race() -> None:
    with emulated.race_detection():
        kernels_on_two_streams(wait=True)
        side, event = emulated.Stream(), emulated.Event()
        tensor = torch.ones(4, device=DEVICE)
        event.record()
        with emulated.stream(side):
            event.wait()
            tensor.add(1)
            tensor[:2].add(1)
        tensor.sum()
        side.synchronize()
        tensor.zero_()
        gc.collect()


def test_halves_of_one_memory_are_no_race() -> None:
    with emulated.race_detection():
        tensor, side = torch.empty(8, device=DEVICE), emulated.Stream()
        tensor[:4].fill_(1)
        with emulated.stream(side):
            tensor[4:].fill_(2)
        emulated.synchronize()


def test_memory_that_is_freed_without_record_stream_is_told_when_it_may_be_given_out_again() -> None:
    with (
        pytest.raises(RuntimeError, match=r"is given out again while copy_ .* reads it.* without record_stream"),
        emulated.race_detection(),
    ):
        copied_and_allocated()
    with emulated.race_detection():
        copied_and_allocated(record=True)
        copied_and_allocated(wait=True)


def copied_and_allocated(record: bool = False, wait: bool = False) -> None:
    side, target = emulated.Stream(), pinned(0, 0)
    source = torch.ones(2, device=DEVICE)
    side.wait_stream(emulated.current_stream())
    with emulated.stream(side):
        target.copy_(source, non_blocking=True)
        if record:
            source.record_stream(side)
    del source
    if wait:
        emulated.current_stream().wait_stream(side)
    torch.empty(2, device=DEVICE)
    side.synchronize()
