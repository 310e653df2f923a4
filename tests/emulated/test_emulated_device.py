"""The emulated device keeps memory, streams, late copies and random numbers as CUDA does, and builds itself once."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fsdp_doctor.emulated  # noqa: F401, which registers the device
from fsdp_doctor.emulated import EmulationUnavailable, build
from fsdp_doctor.emulated import device as emulated

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICE = "emulated"
OTHER = "emulated:1"


@pytest.fixture(autouse=True)
def _device_as_it_was() -> Iterator[None]:
    emulated.set_late_completion(True)
    yield
    emulated.set_memory_limit(None)
    emulated.set_device(0)
    for index in range(emulated.device_count()):
        torch.accelerator.set_stream(emulated.default_stream(index))
        emulated.synchronize(index)
    emulated.set_device(0)
    emulated.set_late_completion(True)


def pinned(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def on_device(*values: float, device: str = DEVICE) -> Tensor:
    """Made on the device alone: no copy of it is in flight."""
    made = torch.empty(len(values), device=device)
    for index, value in enumerate(values):
        made[index].fill_(value)
    return made


def python(
    code: str, *arguments: str, env: dict[str, str] | None = None, without: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    own = {key: value for key, value in os.environ.items() if key not in ("CXX", *without)}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env=own | (env or {}),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(code: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    process = python(code, env=env)
    try:
        stdout, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


# Memory


class Used:
    """Bytes of a device since this was made."""

    def __init__(self, device: int = 0) -> None:
        # A test that failed before may have left tensors in its traceback.
        gc.collect()
        self.device = device
        self.before = emulated.memory_allocated(device)
        emulated.reset_peak_memory_stats(device)

    def now(self) -> int:
        return emulated.memory_allocated(self.device) - self.before

    def peak(self) -> int:
        return emulated.max_memory_allocated(self.device) - self.before


@pytest.mark.parametrize(
    ("nbytes", "counted"), [(0, 0), (1, 512), (511, 512), (512, 512), (513, 1024), (4096, 4096), (5_000_001, 5_000_192)]
)
def test_memory_is_counted_in_multiples_of_512(nbytes: int, counted: int) -> None:
    used = Used()
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    assert used.now() == counted
    del tensor
    assert used.now() == 0


def test_memory_is_given_back_when_the_last_view_goes() -> None:
    used = Used()
    whole = torch.empty(1024, device=DEVICE)
    part = whole[3:5]
    del whole
    assert used.now() == 4096
    del part
    assert used.now() == 0


NO_MEMORY: dict[str, Callable[[Tensor], Any]] = {
    "a view": lambda x: x.view(32, 32).t()[1:],
    "detach": lambda x: x.detach(),
    "in place": lambda x: x.mul_(2).add_(1),
    "contiguous of a contiguous": lambda x: x.contiguous(),
    "to its own dtype": lambda x: x.to(torch.float32),
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "out=": lambda x: torch.add(x, 1, out=x),
    "foreach in place": lambda x: torch._foreach_mul_([x], 2),
    "an empty tensor": lambda x: x[:0].clone(),
    "from the host": lambda x: x.copy_(torch.ones(1024)),
    "printing": lambda x: repr(x),
}


@pytest.mark.parametrize("use", NO_MEMORY.values(), ids=NO_MEMORY)
def test_what_makes_no_tensor_of_the_device_takes_no_memory(use: Callable[[Tensor], Any]) -> None:
    x = on_device(1).expand(1024).contiguous()
    used = Used()
    kept = use(x)
    assert used.now() == 0
    del kept


TAKES: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "clone": (lambda x: x.clone(), 4096),
    "a kernel": (lambda x: x + 1, 4096),
    "a cast": (lambda x: x.to(torch.bfloat16), 2048),
    "several results": (lambda x: x.sort(), 4096 + 8192),
    "a sum": (lambda x: x.sum(), 512),
    "foreach": (lambda x: torch._foreach_add([x, x], 1), 8192),
    "split copies": (lambda x: torch.split_with_sizes_copy(x, [512, 512]), 4096),
    "from the host": (lambda x: torch.ones(256).to(DEVICE), 1024),
    "contiguous of a transposed": (lambda x: x.view(32, 32).t().contiguous(), 4096),
}


@pytest.mark.parametrize(("make", "nbytes"), TAKES.values(), ids=TAKES)
def test_a_result_takes_its_own_memory_and_no_more(make: Callable[[Tensor], Any], nbytes: int) -> None:
    x = on_device(1).expand(1024).contiguous()
    used = Used()
    kept = make(x)
    assert used.now() == nbytes
    del kept
    assert used.now() == 0


def test_the_peak_is_the_most_since_the_last_reset() -> None:
    used = Used()
    one, two = torch.empty(1024, device=DEVICE), torch.empty(1024, device=DEVICE)
    del one
    assert (used.now(), used.peak()) == (4096, 8192)
    emulated.reset_peak_memory_stats()
    assert used.peak() == 4096
    del two
    assert (used.now(), used.peak()) == (0, 4096)


def test_a_training_step_gives_back_all_that_it_took() -> None:
    used = Used()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.SiLU(), torch.nn.Linear(64, 64)).to(DEVICE)
    weights = used.now()
    assert weights == 2 * (64 * 64 * 4 + 512)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 64, device=DEVICE)).sum().backward()
    assert used.now() == 2 * weights
    optimizer.step()
    optimizer.zero_grad()
    # Two moments for each weight, and the steps are counted on the host.
    assert used.now() == 3 * weights
    del model, optimizer
    gc.collect()
    assert used.now() == 0


def test_memory_of_an_autograd_graph_is_given_back_by_backward() -> None:
    x = torch.ones(1024, device=DEVICE, requires_grad=True)
    used = Used()
    loss = x.exp().exp().sum()
    held = used.now()
    loss.backward()
    assert held == 2 * 4096 + 512
    assert used.now() == 512 + 4096


def test_storages_that_are_resized_are_counted_as_they_are() -> None:
    used = Used()
    x = torch.empty(1024, device=DEVICE)
    x.untyped_storage().resize_(0)
    assert used.now() == 0
    x.untyped_storage().resize_(8192)
    assert used.now() == 8192


def test_the_accelerator_api_counts_the_same() -> None:
    x = torch.empty(1024, device=DEVICE)
    torch.accelerator.reset_peak_memory_stats()
    y = torch.empty(1024, device=DEVICE)
    del y
    stats = torch.accelerator.memory_stats()
    assert torch.accelerator.memory_allocated() == emulated.memory_allocated() == torch.accelerator.memory_reserved()
    assert (
        torch.accelerator.max_memory_allocated()
        == emulated.max_memory_allocated()
        == emulated.memory_allocated() + 4096
    )
    assert torch.accelerator.max_memory_reserved() == emulated.max_memory_reserved()
    assert stats["allocated_bytes.all.current"] == emulated.memory_stats()["allocated_bytes.all.current"]
    assert stats["allocated_bytes.all.peak"] == emulated.memory_stats()["allocated_bytes.all.peak"]
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == emulated.memory_allocated() >= x.nbytes


def test_the_accelerator_api_tells_what_is_free() -> None:
    emulated.set_memory_limit(emulated.memory_allocated() + 8192)
    x = torch.empty(1024, device=DEVICE)
    assert emulated.mem_get_info()[0] == 4096
    assert torch.accelerator.get_memory_info() == emulated.mem_get_info()
    del x


def test_the_host_cache_can_be_emptied() -> None:
    code = (
        "import torch, fsdp_doctor.emulated; x = torch.ones(3, device='emulated'); torch.accelerator.empty_host_cache()"
    )
    assert run(code)[0] == 0


def test_the_accelerator_is_the_emulated_device() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(DEVICE)
    assert torch.accelerator.device_count() == emulated.device_count() >= 8
    assert torch.get_device_module() is torch.emulated is emulated
    assert torch.ones(1, device=DEVICE).is_emulated
    assert torch.ones(1).emulated().device == torch.device("emulated", 0)


# Out of memory


TOO_MUCH: dict[str, Callable[[Tensor], Any]] = {
    "empty": lambda x: torch.empty(8192, device=DEVICE),
    "a kernel": lambda x: x.repeat(8),
    "from the host": lambda x: torch.ones(8192).to(DEVICE),
    "resize_": lambda x: x.resize_(8192),
    "a storage": lambda x: x.untyped_storage().resize_(32768),
    "out=": lambda x: torch.add(torch.ones(1, device=DEVICE).expand(8192), 1, out=torch.empty(0, device=DEVICE)),
    "sort": lambda x: torch.ones(1, device=DEVICE).expand(4096).sort(),
}


@pytest.mark.parametrize("take", TOO_MUCH.values(), ids=TOO_MUCH)
def test_too_much_memory_raises_and_takes_nothing(take: Callable[[Tensor], Any]) -> None:
    x = torch.ones(1024, device=DEVICE)
    used = Used()
    emulated.set_memory_limit(emulated.memory_allocated() + 8192)
    with pytest.raises(torch.OutOfMemoryError, match=r"^emulated.* out of memory\. Tried to allocate"):
        take(x)
    gc.collect()
    assert used.now() == 0
    assert x.untyped_storage().nbytes() == 4096
    assert x.sum().item() == 1024


def test_what_fits_exactly_is_not_too_much() -> None:
    emulated.set_memory_limit(emulated.memory_allocated() + 4096)
    x = torch.empty(1024, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device=DEVICE)
    del x
    assert torch.empty(1024, device=DEVICE).numel() == 1024


def test_each_device_has_the_limit_for_itself() -> None:
    emulated.set_memory_limit(max(emulated.memory_allocated(0), emulated.memory_allocated(1)) + 4096)
    one, two = torch.empty(1024, device="emulated:0"), torch.empty(1024, device=OTHER)
    assert one.device != two.device


def test_without_a_limit_again_everything_fits() -> None:
    emulated.set_memory_limit(512)
    emulated.set_memory_limit(None)
    assert torch.empty(1 << 20, device=DEVICE).numel() == 1 << 20


def test_the_limit_does_not_concern_the_host() -> None:
    emulated.set_memory_limit(emulated.memory_allocated() + 512)
    assert torch.ones(100_000).pin_memory().sum() == 100_000


# Pinned memory

PINNED: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "pin_memory": (lambda: torch.ones(4).pin_memory(), True),
    "made pinned": (lambda: torch.empty(4, pin_memory=True), True),
    "zeros made pinned": (lambda: torch.zeros(4, pin_memory=True), True),
    "like, pinned": (lambda: torch.empty_like(torch.ones(4, device=DEVICE), device="cpu", pin_memory=True), True),
    "a slice of pinned": (lambda: torch.ones(4).pin_memory()[2:], True),
    "the last element of pinned": (lambda: torch.ones(4).pin_memory()[3], True),
    "a view of pinned": (lambda: torch.ones(4).pin_memory().view(2, 2).t(), True),
    "pinned and empty": (lambda: torch.empty(0, pin_memory=True), True),
    "a bfloat16 pinned": (lambda: torch.ones(4, dtype=torch.bfloat16).pin_memory(), True),
    "non-blocking to the host": (lambda: torch.ones(4, device=DEVICE).to("cpu", non_blocking=True), True),
    "pageable": (lambda: torch.ones(4), False),
    "a clone of pinned": (lambda: torch.ones(4).pin_memory().clone(), False),
    "a sum of pinned": (lambda: torch.ones(4).pin_memory() + 1, False),
    "blocking to the host": (lambda: torch.ones(4, device=DEVICE).cpu(), False),
    "on the device": (lambda: torch.ones(4, device=DEVICE), False),
}


@pytest.mark.parametrize(("make", "is_pinned"), PINNED.values(), ids=PINNED)
def test_pinned_memory_is_told_from_pageable(make: Callable[[], Tensor], is_pinned: bool) -> None:
    assert make().is_pinned() is is_pinned


def test_pageable_memory_beside_pinned_is_not_pinned() -> None:
    blocks = [torch.ones(16).pin_memory() for _ in range(50)]
    pageable = [torch.ones(16) for _ in range(50)]
    assert all(block.is_pinned() for block in blocks)
    assert not any(block.is_pinned() for block in pageable)


def test_pin_memory_copies_once_and_keeps_the_values() -> None:
    values = torch.randn(5, 3)
    once = values.pin_memory()
    assert torch.equal(once, values)
    assert once.data_ptr() != values.data_ptr()
    assert once.pin_memory() is once
    assert once.untyped_storage().is_pinned()


def test_pinned_memory_is_counted_apart_and_given_back() -> None:
    used, before = Used(), emulated.pinned_memory_allocated()
    block = torch.ones(1000).pin_memory()
    assert emulated.pinned_memory_allocated() - before == 4000
    assert used.now() == 0
    del block
    assert emulated.pinned_memory_allocated() == before


def test_what_is_on_the_device_cannot_be_pinned() -> None:
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(2, device=DEVICE).pin_memory()
    with pytest.raises(RuntimeError, match="pin"):
        torch.empty(2, device=DEVICE, pin_memory=True)


def test_new_pinned_memory_holds_no_values_of_others() -> None:
    torch.ones(1000).pin_memory()
    assert torch.empty(1000, pin_memory=True).isnan().all()


def test_a_data_loader_pins_its_batches() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True)
    batches = list(loader)
    assert [batch.is_pinned() for batch in batches] == [True, True]
    assert torch.cat(batches).tolist() == [0, 1, 2, 3]


# Streams and events


def test_streams_and_events_are_those_of_torch() -> None:
    stream, event = torch.Stream(device=DEVICE), torch.Event(device=DEVICE)
    assert isinstance(emulated.Stream(), torch.Stream)
    assert isinstance(emulated.Event(), torch.Event)
    assert stream.device == torch.device("emulated", 0)
    assert stream.record_event(event) is event or event.query()


def test_streams_are_apart_and_the_default_is_none_of_them() -> None:
    streams = [emulated.Stream() for _ in range(40)]
    assert len({stream.stream_id for stream in streams}) == 40
    assert emulated.default_stream() not in streams
    assert emulated.current_stream() == emulated.default_stream() == torch.accelerator.current_stream()


@pytest.mark.parametrize(
    "enter", [emulated.stream, lambda stream: stream], ids=["torch.emulated.stream", "with stream"]
)
def test_a_stream_is_current_inside_its_context(enter: Callable[[torch.Stream], Any]) -> None:
    stream = torch.Stream(device=DEVICE)
    with enter(stream):
        assert emulated.current_stream() == torch.accelerator.current_stream() == stream
    assert emulated.current_stream() == emulated.default_stream()


def test_a_stream_of_another_device_makes_that_device_current_inside() -> None:
    stream = emulated.Stream(device=1)
    with emulated.stream(stream):
        assert (emulated.current_device(), emulated.current_stream(1)) == (1, stream)
        assert torch.ones(1, device=DEVICE).device.index == 1
    assert (emulated.current_device(), emulated.current_stream(1)) == (0, emulated.default_stream(1))


def test_no_stream_changes_nothing() -> None:
    with emulated.stream(None):
        emulated.set_stream(None)
        assert emulated.current_stream() == emulated.default_stream()


def test_each_thread_has_a_current_stream_and_device_of_its_own() -> None:
    seen: list[Any] = []
    emulated.set_device(1)
    with emulated.Stream(device=1):
        thread = threading.Thread(target=lambda: seen.extend((emulated.current_device(), emulated.current_stream(1))))
        thread.start()
        thread.join()
    assert seen == [0, emulated.default_stream(1)]


def test_an_event_that_was_not_recorded_has_happened() -> None:
    event = torch.Event(device=DEVICE)
    assert event.query()
    event.synchronize()
    emulated.current_stream().wait_event(event)


def test_time_between_events_goes_forward() -> None:
    events = [torch.Event(device=DEVICE, enable_timing=True) for _ in range(3)]
    for event in events:
        event.record()
        torch.ones(1000, device=DEVICE).sort()
    assert 0 < events[0].elapsed_time(events[1]) < events[0].elapsed_time(events[2])
    assert events[1].elapsed_time(events[0]) < 0


def test_time_to_an_event_that_was_not_recorded_is_refused() -> None:
    one, two = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(2))
    one.record()
    with pytest.raises((RuntimeError, ValueError), match="recorded"):
        one.elapsed_time(two)


def test_an_event_recorded_again_stands_for_the_later_moment() -> None:
    event, here = torch.Event(device=DEVICE), pinned(0)
    event.record()
    here.copy_(on_device(1), non_blocking=True)
    event.record()
    event.synchronize()
    assert here.item() == 1


def test_record_stream_is_accepted() -> None:
    on_device(1).record_stream(emulated.Stream())


# Late completion: from the device to pinned memory

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
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "bool": lambda x: bool(x.sum()),
    "values set by a mask": lambda x: x.__setitem__(x > 0, torch.ones_like(x)),
    "repeat_interleave by counts": lambda x: x.repeat_interleave(x.long()),
    "bincount": lambda x: x.long().bincount(),
    "unique": lambda x: x.unique(),
    "printing": lambda x: repr(x),
    "another stream that waited, and its synchronize": lambda x: (
        lambda other: (other.wait_stream(emulated.current_stream()), other.synchronize())
    )(emulated.Stream()),
    "a chain of two streams that waited": lambda x: (
        lambda one, two: (one.wait_stream(emulated.current_stream()), two.wait_stream(one), two.synchronize())
    )(emulated.Stream(), emulated.Stream()),
    "late completion switched off": lambda x: emulated.set_late_completion(False),
}

NO_WAITS: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: None,
    "a kernel": lambda x: x + 1,
    "a reduction": lambda x: x.sum(),
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
    "reading host memory": lambda x: torch.ones(2).sum().item(),
    "allocating and freeing": lambda x: torch.empty(100, device=DEVICE).numel(),
}


def in_stream(stream: torch.Stream, do: Callable[[], Any]) -> Any:
    with emulated.stream(stream):
        return do()


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_late_copy_to_the_host_is_visible_after(wait: Callable[[Tensor], Any]) -> None:
    x, here = on_device(3, 4), pinned(0, 0)
    here.copy_(x, non_blocking=True)
    assert here.tolist() == [0, 0]
    wait(x)
    assert here.tolist() == [3, 4]


@pytest.mark.parametrize("do", NO_WAITS.values(), ids=NO_WAITS)
def test_a_late_copy_to_the_host_is_not_visible_after(do: Callable[[Tensor], Any]) -> None:
    x, here = on_device(3, 4), pinned(0, 0)
    here.copy_(x, non_blocking=True)
    do(x)
    assert here.tolist() == [0, 0]
    emulated.synchronize()
    assert here.tolist() == [3, 4]


def test_a_query_is_false_while_a_copy_is_in_flight_and_true_soon() -> None:
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


LATE_TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "all of it": lambda here: here,
    "a slice": lambda here: here[1:],
    "transposed": lambda here: here.t(),
}


@pytest.mark.parametrize("part", LATE_TARGETS.values(), ids=LATE_TARGETS)
def test_a_copy_to_a_part_of_pinned_memory_is_late(part: Callable[[Tensor], Tensor]) -> None:
    here, x = torch.zeros(3, 3).pin_memory(), part(torch.ones(3, 3, device=DEVICE))
    part(here).copy_(x, non_blocking=True)
    assert here.sum() == 0
    emulated.synchronize()
    assert here.sum() == x.numel()


# Late completion: from pinned memory to the device


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


def test_a_kernel_on_the_same_stream_sees_the_copy() -> None:
    x = on_device(0, 0)
    x.copy_(pinned(1, 2), non_blocking=True)
    assert (x * 10).tolist() == [10, 20]


@pytest.mark.parametrize(
    "wait",
    [
        lambda stream, event: emulated.current_stream().wait_stream(stream),
        lambda stream, event: emulated.current_stream().wait_event(event),
        lambda stream, event: event.wait(),
        lambda stream, event: stream.synchronize(),
        lambda stream, event: event.synchronize(),
        lambda stream, event: emulated.synchronize(),
    ],
    ids=["wait_stream", "wait_event", "event.wait", "stream.synchronize", "event.synchronize", "synchronize"],
)
def test_a_kernel_on_another_stream_sees_the_copy_if_it_waited(wait: Callable[..., Any]) -> None:
    x, source, stream = on_device(0, 0), pinned(1, 2), emulated.Stream()
    with emulated.stream(stream):
        x.copy_(source, non_blocking=True)
    event = stream.record_event()
    assert (x + 0).tolist() == [0, 0]
    wait(stream, event)
    assert (x + 0).tolist() == [1, 2]


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


def test_a_round_trip_through_the_host_without_a_wait_takes_the_old_bytes() -> None:
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


# What is never late

PROMPT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "to pageable memory": lambda here, x: here.copy_(x, non_blocking=True),
    "blocking to pageable memory": lambda here, x: here.copy_(x),
}


@pytest.mark.parametrize("copy", PROMPT.values(), ids=PROMPT)
def test_a_copy_to_pageable_memory_is_immediate(copy: Callable[[Tensor, Tensor], Any]) -> None:
    here = torch.zeros(2)
    copy(here, on_device(3, 4))
    assert here.tolist() == [3, 4]
    assert emulated.copies_in_flight() == 0


def test_a_copy_from_pageable_memory_takes_the_bytes_of_the_call() -> None:
    here, x = torch.tensor([1.0, 2.0]), on_device(0, 0)
    x.copy_(here, non_blocking=True)
    here.fill_(9)
    assert x.tolist() == [1, 2]


@pytest.mark.parametrize("to_device", [True, False], ids=["to the device", "to the host"])
def test_a_blocking_copy_of_pinned_memory_is_immediate(to_device: bool) -> None:
    here, x = pinned(1, 2), on_device(3, 4)
    x.copy_(here) if to_device else here.copy_(x)
    here_after, expected = here.tolist(), [1, 2] if to_device else [3, 4]
    here.fill_(9)
    assert (here_after, x.tolist()) == (expected, expected)


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


def test_a_storage_that_is_resized_while_a_copy_is_in_flight_does_no_harm() -> None:
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


# Two devices in one process


def test_two_devices_have_memory_streams_and_copies_of_their_own() -> None:
    here = [pinned(0), pinned(0)]
    used = [Used(0), Used(1)]
    x, y = on_device(1), on_device(2, device=OTHER)
    assert [device.now() for device in used] == [512, 512]
    here[0].copy_(x, non_blocking=True)
    here[1].copy_(y, non_blocking=True)
    emulated.synchronize(1)
    assert [tensor.item() for tensor in here] == [0, 2]
    emulated.synchronize(0)
    assert [tensor.item() for tensor in here] == [1, 2]


def test_results_stay_on_the_device_of_their_inputs() -> None:
    x = on_device(1, 2, device=OTHER)
    results = [x + 1, x.sum(), x[0], torch.cat([x, x]), torch._foreach_add([x], 1)[0], torch.zeros_like(x), x.clone()]
    assert {result.device for result in results} == {torch.device(OTHER)}


def test_gradients_stay_on_the_device_of_their_weights() -> None:
    x = on_device(1, 2, device=OTHER).requires_grad_()
    (x.to("emulated:0") * 3).sum().backward()
    assert x.grad is not None
    assert (x.grad.device, x.grad.tolist()) == (torch.device(OTHER), [3, 3])


@pytest.mark.parametrize(
    "enter",
    [lambda: emulated.device(1), lambda: torch.device(OTHER), lambda: torch.accelerator.device_index(1)],
    ids=["torch.emulated.device", "torch.device", "torch.accelerator.device_index"],
)
def test_a_device_can_be_made_the_current_one(enter: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    with enter():
        made = [torch.ones(1, device=DEVICE), torch.empty(1, device=DEVICE), torch.tensor([1.0], device=DEVICE)]
        if emulated.current_device() == 0:
            made = [torch.ones(1), torch.empty(1), torch.tensor([1.0])]
    assert {tensor.device for tensor in made} == {torch.device(OTHER)}
    assert emulated.current_device() == 0


@pytest.mark.parametrize("index", [8, 20, 63, 64, 100])
def test_a_device_that_does_not_exist_is_refused(index: int) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device=f"emulated:{index}")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1).to(f"emulated:{index}")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        emulated.set_device(index)


# Autograd, checkpoints, random numbers


def network() -> torch.nn.Sequential:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.SiLU(), torch.nn.Linear(16, 4))


def gradients(model: torch.nn.Module, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(9)
    forward(torch.ones(3, 8, device=DEVICE, requires_grad=True)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpoint_draws_the_same_random_numbers_again(reentrant: bool) -> None:
    model = network().to(DEVICE)
    plain = gradients(model, model)
    again = gradients(model, lambda x: checkpoint(model, x, use_reentrant=reentrant))
    assert len(plain) == 4
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def test_autograd_runs_backward_on_the_stream_of_the_forward() -> None:
    x, seen, stream = on_device(1).requires_grad_(), list[torch.Stream](), emulated.Stream()
    with emulated.stream(stream):
        y = x * 2
        y.register_hook(lambda gradient: seen.append(emulated.current_stream()))
        y.sum().backward()
    assert seen == [stream]
    emulated.current_stream().wait_stream(stream)
    assert x.grad is not None
    assert x.grad.item() == 2


def test_saved_tensors_can_be_offloaded_while_the_graph_lives() -> None:
    x = torch.randn(16, device=DEVICE, requires_grad=True)
    plain = torch.autograd.grad((x.exp() * x.sin()).sum(), x)[0]
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = (x.exp() * x.sin()).sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], plain)


def test_a_gradient_of_another_device_is_refused() -> None:
    x = on_device(1).requires_grad_()
    with pytest.raises(RuntimeError, match="assign"):
        x.grad = torch.ones(1)


def test_the_random_state_is_16_bytes_on_the_host() -> None:
    state = emulated.get_rng_state()
    assert (state.shape, state.dtype, state.device.type) == ((16,), torch.uint8, "cpu")


def test_the_random_state_brings_the_numbers_back() -> None:
    torch.manual_seed(4)
    torch.randn(3, device=DEVICE)
    state = emulated.get_rng_state()
    first = torch.randn(5, device=DEVICE)
    assert not torch.equal(state, emulated.get_rng_state())
    emulated.set_rng_state(state)
    assert torch.equal(torch.randn(5, device=DEVICE), first)


def test_a_random_state_of_another_size_is_refused() -> None:
    with pytest.raises(RuntimeError, match="16 bytes"):
        emulated.set_rng_state(torch.get_rng_state())


def test_each_device_has_random_numbers_of_its_own() -> None:
    torch.manual_seed(4)
    assert emulated.initial_seed() == 4
    one, two = torch.randn(5, device=DEVICE), torch.randn(5, device=OTHER)
    assert torch.equal(one.cpu(), two.cpu())
    state = emulated.get_rng_state(1)
    torch.randn(5, device=DEVICE)
    assert torch.equal(emulated.get_rng_state(1), state)
    assert len(emulated.get_rng_state_all()) == emulated.device_count()


def test_forked_random_numbers_leave_the_state_alone() -> None:
    state = emulated.get_rng_state()
    with torch.random.fork_rng([0], device_type=DEVICE):
        torch.manual_seed(77)
        torch.randn(5, device=DEVICE)
    assert torch.equal(emulated.get_rng_state(), state)


def test_a_generator_can_be_copied() -> None:
    generator = torch.Generator(DEVICE).manual_seed(3)
    torch.randn(2, device=DEVICE, generator=generator)
    copied = generator.clone_state()
    one = torch.randn(5, device=DEVICE, generator=generator)
    assert torch.equal(one, torch.randn(5, device=DEVICE, generator=copied))


# The build

_IMPORT = """
try:
    import fsdp_doctor.emulated
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
else:
    import torch
    print(torch.ones(5, device="emulated").sum().item())
"""
_BUILDING = "building the emulated accelerator"


def compiler(directory: pathlib.Path, script: str) -> str:
    """A program that says its version, and otherwise does what ``script`` says."""
    path = directory / "compiler"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit 0\n{script}\n')
    path.chmod(0o755)
    return str(path)


REFUSALS: dict[str, tuple[Callable[[pathlib.Path], dict[str, str]], str]] = {
    "no compiler on the path": (lambda tmp: {"PATH": str(tmp)}, r"there is none \(c\+\+, g\+\+, clang\+\+ not found\)"),
    "a compiler that is missing": (lambda tmp: {"CXX": "no-such-compiler -O2"}, r"CXX=no-such-compiler -O2 not found"),
    "a compiler that does not run": (lambda tmp: {"CXX": "false"}, "the C\\+\\+ compiler false does not run"),
    "a compiler that fails": (
        lambda tmp: {"CXX": compiler(tmp, "echo 'x.cpp:1: error: no good' >&2; exit 1")},
        "could not be built for torch .*: x.cpp:1: error: no good$",
    ),
    "a compiler that fails without a word": (
        lambda tmp: {"CXX": compiler(tmp, "exit 1")},
        "could not be built for torch",
    ),
    "no headers of Python": (
        lambda tmp: {"CXX": compiler(tmp, "echo 'fatal error: Python.h: No such file' >&2; exit 1")},
        "python3-dev",
    ),
    "a cache under a file": (
        lambda tmp: {"FSDP_DOCTOR_CACHE": str(file_in(tmp) / "cache")},
        r"cannot be kept in .*: Not a directory; set FSDP_DOCTOR_CACHE$",
    ),
}


def file_in(directory: pathlib.Path) -> pathlib.Path:
    path = directory / "file"
    path.touch()
    return path


def build_with(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> str:
    """What the refusal of a build in this environment says."""
    monkeypatch.delenv("CXX", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EmulationUnavailable) as refusal:
        build.library()
    return str(refusal.value)


@pytest.mark.parametrize(("env", "sentence"), REFUSALS.values(), ids=REFUSALS)
def test_a_build_that_cannot_be_is_refused_in_one_sentence(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    env: Callable[[pathlib.Path], dict[str, str]],
    sentence: str,
) -> None:
    (tmp_path / "bin").mkdir()
    said = build_with(monkeypatch, {"FSDP_DOCTOR_CACHE": str(tmp_path / "cache"), **env(tmp_path / "bin")})
    assert re.search(sentence, said)
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("variable", ["PATH", "CXX"])
def test_an_import_without_a_compiler_is_an_import_error(tmp_path: pathlib.Path, variable: str) -> None:
    env = {"FSDP_DOCTOR_CACHE": str(tmp_path), variable: str(tmp_path / "nothing")}
    code, stdout, stderr = run(_IMPORT, env)
    assert (code, stderr) == (0, "")
    assert re.fullmatch(r"EmulationUnavailable: the emulated accelerator is built with a C\+\+ compiler.*\n", stdout)


def test_a_build_that_failed_leaves_nothing_behind_and_is_tried_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        build_with(monkeypatch, {"FSDP_DOCTOR_CACHE": str(tmp_path / "cache"), "CXX": compiler(tmp_path, "exit 1")})
        assert _BUILDING in capfd.readouterr().err
        assert [path.name for path in (tmp_path / "cache").glob("*/*")] == ["lock"]


@pytest.fixture(scope="module")
def built_at_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[tuple[int, str, str]]]:
    """An empty cache, and what four processes that wanted it at once said."""
    cache = tmp_path_factory.mktemp("cache")
    processes = [python(_IMPORT, env={"FSDP_DOCTOR_CACHE": str(cache)}) for _ in range(4)]
    said = [process.communicate(timeout=500) for process in processes]
    return cache, [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def test_of_many_processes_one_builds_and_all_work(built_at_once: tuple[Any, list[tuple[int, str, str]]]) -> None:
    _, ends = built_at_once
    assert [(code, stdout) for code, stdout, _ in ends] == [(0, "5.0\n")] * 4
    assert "".join(stderr for _, _, stderr in ends).count(_BUILDING) == 1


def test_a_library_that_is_built_is_used_without_a_word(built_at_once: tuple[pathlib.Path, Any]) -> None:
    cache, _ = built_at_once
    assert run(_IMPORT, {"FSDP_DOCTOR_CACHE": str(cache)}) == (0, "5.0\n", "")
    assert len(list(cache.glob("*/_C*.so"))) == 1
    assert {path.name for path in cache.glob("*/*")} == {"lock", next(cache.glob("*/_C*.so")).name}


@pytest.mark.parametrize("version", ["2.9.1", "2.9.0+cu128", "2.6.0", "1.13.1"])
def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(EmulationUnavailable, match=r"needs torch 2\.10 or newer, this is torch") as refusal:
        build._check_torch()
    assert isinstance(refusal.value, ImportError)


@pytest.mark.parametrize("version", ["2.10.0", "2.10.0a0+git1234", "2.13.1+cu130", "3.0.0"])
def test_a_newer_torch_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    build._check_torch()


@pytest.mark.parametrize(
    ("variables", "directory"),
    [
        ({"FSDP_DOCTOR_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/fsdp-doctor"),
        ({"FSDP_DOCTOR_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/someone/.cache/fsdp-doctor"),
        ({}, "/home/someone/.cache/fsdp-doctor"),
    ],
)
def test_the_cache_is_where_the_variables_say(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], directory: str
) -> None:
    for name in ("FSDP_DOCTOR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/someone", **variables}.items():
        monkeypatch.setenv(name, value)
    assert build.cache_directory() == pathlib.Path(directory)


def test_another_torch_compiler_or_flag_is_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    command = build._compiler()
    before = build._key(command)
    assert build._key(command) == before
    with monkeypatch.context() as changed:
        changed.setattr(torch, "__version__", "2.99.0")
        assert build._key(command) != before
    monkeypatch.setattr(build, "_flags", lambda: ["-O3"])
    assert build._key(command) != before


def test_there_are_as_many_devices_as_ranks_on_the_host() -> None:
    code = "import torch, fsdp_doctor.emulated; print(torch.accelerator.device_count())"
    assert run(code, {"LOCAL_WORLD_SIZE": "12"})[:2] == (0, "12\n")


def test_a_device_of_another_name_in_its_place_is_said() -> None:
    assert run("import torch; torch.utils.rename_privateuse1_backend('other')" + _IMPORT)[:2] == (
        0,
        "EmulationUnavailable: torch has room for one device of this kind, and other has taken it\n",
    )
