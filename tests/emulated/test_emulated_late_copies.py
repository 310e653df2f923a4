"""Non-blocking copies are as late as they may be, and never later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulated_device import DEVICE, Used, check_each, emulated, in_stream, on_device, pinned
from torch import Tensor

pytestmark = pytest.mark.usefixtures("device_as_it_was")

# From the device to pinned memory

WAITS: dict[str, Callable[[Tensor], Any]] = {
    "torch.emulated.synchronize": lambda x: emulated.synchronize(),
    "torch.accelerator.synchronize": lambda x: torch.accelerator.synchronize(),
    "stream.synchronize": lambda x: emulated.current_stream().synchronize(),
    "event.synchronize": lambda x: emulated.current_stream().record_event().synchronize(),
    "torch.Event.synchronize": lambda x: (lambda event: (event.record(), event.synchronize()))(torch.Event(DEVICE)),
    "stream.query until it is true": lambda x: [emulated.current_stream().query() for _ in range(2)],
    "event.query until it is true": lambda x: (lambda event: (event.query(), event.query()))(
        emulated.current_stream().record_event()
    ),
    "a blocking copy to pageable memory": lambda x: x.cpu(),
    "a blocking copy to pinned memory": lambda x: torch.empty(2, pin_memory=True).copy_(x),
    "a non-blocking copy to pageable memory": lambda x: torch.empty(2).copy_(x, non_blocking=True),
    "a blocking copy from pageable memory": lambda x: x.copy_(torch.ones(2)),
    "a blocking copy from pinned memory": lambda x: x.copy_(pinned(1, 1)),
    "item": lambda x: x[0].item(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave by counts": lambda x: x.repeat_interleave(x.long()),
    "unique": lambda x: x.unique(),
    "printing": lambda x: repr(x),
    "a chain of two streams that waited": lambda x: (
        lambda one, two: (one.wait_stream(emulated.current_stream()), two.wait_stream(one), two.synchronize())
    )(emulated.Stream(), emulated.Stream()),
    "late completion switched off": lambda x: emulated.set_late_completion(False),
}
NO_WAITS: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: None,
    "a kernel": lambda x: x + 1,
    "a matmul": lambda x: x @ x,
    "a copy within the device": lambda x: x.clone(),
    "a non-blocking copy from pinned memory": lambda x: x.copy_(pinned(1, 1), non_blocking=True),
    "a non-blocking copy from pageable memory": lambda x: x.copy_(torch.ones(2), non_blocking=True),
    "another non-blocking copy to pinned memory": lambda x: pinned(0, 0).copy_(x, non_blocking=True),
    "synchronize of another stream": lambda x: emulated.Stream().synchronize(),
    "synchronize of another device": lambda x: emulated.synchronize(1),
    "an event that was recorded": lambda x: emulated.current_stream().record_event(),
    "another stream that waits and computes": lambda x: (
        lambda other: (other.wait_stream(emulated.current_stream()), in_stream(other, lambda: x + 1))
    )(emulated.Stream()),
    "item on another stream": lambda x: in_stream(emulated.Stream(), lambda: x[0].item()),
    "allocating and freeing": lambda x: torch.empty(100, device=DEVICE).numel(),
}


def test_a_late_copy_to_the_host_is_visible_only_after_a_wait() -> None:
    def check(do: Callable[[Tensor], Any], waits: bool) -> None:
        emulated.set_late_completion(True)
        x, here = on_device(3, 4), pinned(0, 0)
        here.copy_(x, non_blocking=True)
        assert here.tolist() == [0, 0]
        do(x)
        assert here.tolist() == ([3, 4] if waits else [0, 0])
        emulated.synchronize()
        assert here.tolist() == [3, 4]

    check_each(WAITS, lambda do: check(do, waits=True))
    check_each(NO_WAITS, lambda do: check(do, waits=False))


def test_a_query_is_false_during_a_copy_and_true_soon_afterwards() -> None:
    here, stream = pinned(0), emulated.current_stream()
    event = torch.Event(device=DEVICE)
    for query in (stream.query, event.query):
        here.copy_(on_device(1), non_blocking=True)
        event.record()
        assert not query()
        assert query()


def test_copies_in_flight_are_counted() -> None:
    x, here = on_device(1), pinned(0)
    assert emulated.copies_in_flight() == 0
    here.copy_(x, non_blocking=True)
    x.copy_(here, non_blocking=True)
    assert emulated.copies_in_flight() == 2
    emulated.synchronize()
    assert emulated.copies_in_flight() == 0


def test_the_bytes_that_reach_the_host_are_those_of_the_call() -> None:
    x, here = on_device(3, 4), pinned(0, 0)
    here.copy_(x, non_blocking=True)
    x.zero_()
    x.add_(7)
    emulated.synchronize()
    assert here.tolist() == [3, 4]


def test_an_event_waits_for_what_is_before_it_alone() -> None:
    x, first, second = on_device(3), pinned(0), pinned(0)
    first.copy_(x, non_blocking=True)
    event = emulated.current_stream().record_event()
    second.copy_(x, non_blocking=True)
    event.synchronize()
    assert (first.item(), second.item()) == (3, 0)


def test_to_the_host_without_blocking_is_late_too() -> None:
    here = on_device(3, 4).to("cpu", non_blocking=True)
    assert here.isnan().all()
    emulated.synchronize()
    assert here.tolist() == [3, 4]


def test_a_copy_to_a_part_of_pinned_memory_is_late() -> None:
    for part in (lambda whole: whole, lambda whole: whole[1:], lambda whole: whole.t()):
        here, x = torch.zeros(3, 3).pin_memory(), part(torch.ones(3, 3, device=DEVICE))
        part(here).copy_(x, non_blocking=True)
        assert here.sum() == 0
        emulated.synchronize()
        assert here.sum() == x.numel()


# From pinned memory to the device


def test_what_the_host_changes_before_the_device_looks_arrives_changed() -> None:
    here, x = pinned(1, 2), on_device(0, 0)
    x.copy_(here, non_blocking=True)
    here.fill_(9)
    assert (x + 0).tolist() == [9, 9]
    here.fill_(5)
    assert x.tolist() == [9, 9]


def test_to_the_device_without_blocking_is_late_too() -> None:
    here = pinned(1, 2)
    x = here.to(DEVICE, non_blocking=True)
    here.fill_(9)
    assert x.tolist() == [9, 9]


JOINS: dict[str, Callable[[torch.Stream, torch.Event], Any]] = {
    "wait_stream": lambda stream, event: emulated.current_stream().wait_stream(stream),
    "wait_event": lambda stream, event: emulated.current_stream().wait_event(event),
    "event.wait": lambda stream, event: event.wait(),
    "stream.synchronize": lambda stream, event: stream.synchronize(),
    "event.synchronize": lambda stream, event: event.synchronize(),
    "synchronize": lambda stream, event: emulated.synchronize(),
}


def test_a_kernel_sees_copies_of_its_stream_and_of_streams_it_awaited() -> None:
    def check(join: Callable[[torch.Stream, torch.Event], Any]) -> None:
        x, source, stream = on_device(0, 0), pinned(1, 2), emulated.Stream()
        with emulated.stream(stream):
            x.copy_(source, non_blocking=True)
        event = stream.record_event()
        assert (x + 0).tolist() == [0, 0]
        join(stream, event)
        assert (x + 0).tolist() == [1, 2]
        x.copy_(pinned(3, 4), non_blocking=True)
        assert (x * 10).tolist() == [30, 40]

    check_each(JOINS, check)


def test_an_event_from_before_the_copy_does_not_order_it() -> None:
    x, source, stream = on_device(0), pinned(1), emulated.Stream()
    event = stream.record_event()
    with emulated.stream(stream):
        x.copy_(source, non_blocking=True)
    emulated.current_stream().wait_event(event)
    assert x.item() == 0


def test_a_chain_of_streams_carries_the_copy() -> None:
    x, source = on_device(0), pinned(1)
    first, second = emulated.Stream(), emulated.Stream()
    with emulated.stream(first):
        x.copy_(source, non_blocking=True)
    second.wait_stream(first)
    emulated.current_stream().wait_stream(second)
    assert x.item() == 1


def test_copies_of_one_stream_happen_in_their_order() -> None:
    x, here = on_device(0), pinned(0)
    x.copy_(pinned(1), non_blocking=True)
    here.copy_(x, non_blocking=True)
    x.copy_(pinned(2), non_blocking=True)
    assert here.item() == 0
    emulated.synchronize()
    assert (here.item(), x.item()) == (1, 2)


def test_a_round_trip_through_the_host_without_waiting_reads_old_bytes() -> None:
    """The race of an offload that reads what it has just begun to write: two streams, no event."""
    x, y, here, out = on_device(5), on_device(0), pinned(1), emulated.Stream()
    with emulated.stream(out):
        here.copy_(x, non_blocking=True)
    y.copy_(here, non_blocking=True)
    assert y.item() == 1


def test_a_round_trip_on_one_stream_takes_the_new_bytes() -> None:
    x, y, here = on_device(5), on_device(0), pinned(1)
    here.copy_(x, non_blocking=True)
    y.copy_(here, non_blocking=True)
    assert y.item() == 5


def test_two_streams_that_wait_for_each_other_do_not_stand_still() -> None:
    one, two, here, x = emulated.Stream(), emulated.Stream(), pinned(0, 0), on_device(1, 2)
    with emulated.stream(one):
        here[:1].copy_(x[:1], non_blocking=True)
    two.wait_stream(one)
    with emulated.stream(two):
        here[1:].copy_(x[1:], non_blocking=True)
    one.wait_stream(two)
    two.wait_stream(one)
    one.synchronize()
    assert here.tolist() == [1, 2]
    emulated.synchronize()
    assert emulated.copies_in_flight() == 0


def test_late_copies_between_waits_in_turn_all_arrive() -> None:
    """Each wait stands for two earlier ones: to look through all of them once for each would never end."""
    home, side = emulated.current_stream(), emulated.Stream()
    targets = [pinned(0, 0) for _ in range(64)]
    for number, target in enumerate(targets):
        side.wait_stream(home)
        in_stream(side, lambda number=number: on_device(number, number) + 1)
        home.wait_stream(side)
        target.copy_(on_device(number, number), non_blocking=True)
    home.synchronize()
    assert [target[0].item() for target in targets] == list(range(64))


# What is never late


def test_a_copy_to_or_from_pageable_memory_is_immediate() -> None:
    for non_blocking in (False, True):
        here, x = torch.zeros(2), on_device(3, 4)
        here.copy_(x, non_blocking=non_blocking)
        assert here.tolist() == [3, 4]
        x.copy_(here.fill_(1), non_blocking=non_blocking)
        here.fill_(9)
        assert x.tolist() == [1, 1]
        assert emulated.copies_in_flight() == 0


def test_a_blocking_copy_of_pinned_memory_is_immediate() -> None:
    here, x = pinned(1, 2), on_device(3, 4)
    x.copy_(here)
    here.fill_(9)
    assert x.tolist() == [1, 2]
    here.copy_(x)
    assert here.tolist() == [1, 2]


def test_without_late_completion_all_is_immediate() -> None:
    x, here, source = on_device(3, 4), pinned(0, 0), pinned(5, 6)
    emulated.set_late_completion(False)
    assert not emulated.late_completion()
    here.copy_(x, non_blocking=True)
    x.copy_(source, non_blocking=True)
    source.fill_(9)
    assert (here.tolist(), emulated.copies_in_flight()) == ([3, 4], 0)
    assert in_stream(emulated.Stream(), lambda: (x + 0).tolist()) == [5, 6]
    assert emulated.current_stream().query()


# What is freed while a copy is in flight


def test_a_pinned_source_that_is_freed_arrives_all_the_same() -> None:
    x, source = torch.zeros(1000, device=DEVICE), torch.full((1000,), 3.0).pin_memory()
    x.copy_(source, non_blocking=True)
    del source
    others = [torch.full((1000,), 8.0).pin_memory() for _ in range(20)]
    assert x.sum().item() == 3000
    assert all(other.sum() == 8000 for other in others)


def test_a_pinned_target_that_is_freed_does_no_harm() -> None:
    x, here = torch.ones(1000, device=DEVICE), torch.zeros(1000).pin_memory()
    here.copy_(x, non_blocking=True)
    del here
    others = [torch.full((1000,), 8.0) for _ in range(20)] + [torch.full((1000,), 8.0).pin_memory() for _ in range(20)]
    emulated.synchronize()
    assert all(other.sum() == 8000 for other in others)


def test_a_tensor_of_the_device_that_is_freed_does_no_harm() -> None:
    used, here = Used(), torch.zeros(1000).pin_memory()
    x = torch.ones(1000, device=DEVICE)
    here.copy_(x, non_blocking=True)
    x.copy_(torch.zeros(1000).pin_memory(), non_blocking=True)
    del x
    assert used.now() == 0
    others = [torch.full((1000,), 8.0, device=DEVICE) for _ in range(20)]
    emulated.synchronize()
    assert here.sum() == 1000
    assert all(other.sum().item() == 8000 for other in others)


def test_resizing_a_storage_during_a_copy_does_no_harm() -> None:
    x, source = torch.zeros(1000, device=DEVICE), torch.ones(1000).pin_memory()
    with emulated.stream(emulated.Stream()):
        x.copy_(source, non_blocking=True)
    x.untyped_storage().resize_(0)
    others = [torch.full((1000,), 8.0, device=DEVICE) for _ in range(20)]
    emulated.synchronize()
    assert x.untyped_storage().size() == 0
    assert all(other.sum().item() == 8000 for other in others)


def test_copies_of_many_threads_all_arrive() -> None:
    targets = [torch.zeros(64).pin_memory() for _ in range(8)]

    def offload(value: int) -> None:
        with emulated.stream(emulated.Stream()):
            for _ in range(100):
                targets[value].copy_(torch.full((64,), float(value), device=DEVICE), non_blocking=True)
            emulated.current_stream().synchronize()

    threads = [threading.Thread(target=offload, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [target.sum().item() for target in targets] == [64 * value for value in range(8)]
