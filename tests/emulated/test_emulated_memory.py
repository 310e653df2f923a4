"""The emulated device counts memory, runs out of it, and distinguishes pinned from pageable memory, as CUDA does.

On request it reserves memory in segments, poisons freed memory, and reports races between streams.
"""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulated_device import DEVICE, OTHER, Used, check_each, emulated, on_device, pinned
from torch import Tensor

pytestmark = pytest.mark.usefixtures("device_as_it_was")
MIB = 2**20


def test_memory_is_counted_in_multiples_of_512_until_the_last_view_goes() -> None:
    used = Used()
    sizes = {0: 0, 1: 512, 512: 512, 513: 1024, 5_000_001: 5_000_192}
    for nbytes, counted in sizes.items():
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
        assert used.now() == counted
        part = tensor[:1]
        del tensor
        assert used.now() == counted
        del part
        assert used.now() == 0


# What each makes of a tensor of 4 KiB, and how many bytes of the device that takes.
TAKES: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "a view": (lambda x: x.view(32, 32).t()[1:], 0),
    "detach": (lambda x: x.detach(), 0),
    "in place": (lambda x: x.mul_(2).add_(1), 0),
    "contiguous of a contiguous": (lambda x: x.contiguous(), 0),
    "tolist": (lambda x: x.tolist(), 0),
    "cpu": (lambda x: x.cpu(), 0),
    "out=": (lambda x: torch.add(x, 1, out=x), 0),
    "foreach in place": (lambda x: torch._foreach_mul_([x], 2), 0),
    "copy_ from the host": (lambda x: x.copy_(torch.ones(1024)), 0),
    "printing": (lambda x: repr(x), 0),
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


def test_a_result_takes_its_own_memory_and_no_more() -> None:
    def check(entry: tuple[Callable[[Tensor], Any], int]) -> None:
        make, nbytes = entry
        x = on_device(1).expand(1024).contiguous()
        used = Used()
        result = make(x)
        assert used.now() == nbytes
        del result
        assert used.now() == 0

    check_each(TAKES, check)


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
    assert stats == emulated.memory_stats()
    pools = {name: stats[f"allocated_bytes.{name}.current"] for name in ("all", "small_pool", "large_pool")}
    assert pools["all"] == pools["small_pool"] + pools["large_pool"]
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == emulated.memory_allocated() >= x.nbytes


def test_the_accelerator_api_tells_what_is_free() -> None:
    emulated.set_memory_limit(emulated.memory_allocated() + 8192)
    x = torch.empty(1024, device=DEVICE)
    assert emulated.mem_get_info()[0] == 4096
    assert torch.accelerator.get_memory_info() == emulated.mem_get_info()
    del x


def test_the_accelerator_is_the_emulated_device() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(DEVICE)
    assert torch.accelerator.device_count() == emulated.device_count() >= 8
    assert torch.get_device_module() is torch.emulated is emulated
    assert torch.ones(1, device=DEVICE).is_emulated
    assert torch.ones(1).emulated().device == torch.device("emulated", 0)


def test_memory_statistics_have_the_names_of_cuda() -> None:
    held = torch.empty(1000, device=DEVICE)
    stats = emulated.memory_stats()
    assert stats["active_bytes.all.current"] == stats["allocated_bytes.all.current"] == emulated.memory_allocated()
    assert emulated.memory_stats_as_nested_dict()["active_bytes"]["all"]["peak"] == stats["active_bytes.all.peak"]
    assert "active_bytes.all.current" in emulated.memory_summary()
    assert {"peak", "current", "allocated", "freed"} == set(emulated.memory_stats_as_nested_dict()["segment"]["all"])
    block = next(segment for segment in emulated.memory_snapshot() if segment["address"] == held.data_ptr())["blocks"][
        0
    ]
    assert (block["size"], block["requested_size"], block["state"]) == (4096, 4000, "active_allocated")
    del held


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


def test_too_much_memory_raises_and_takes_nothing() -> None:
    def check(take: Callable[[Tensor], Any]) -> None:
        emulated.set_memory_limit(None)
        x = torch.ones(1024, device=DEVICE)
        used = Used()
        emulated.set_memory_limit(emulated.memory_allocated() + 8192)
        with pytest.raises(torch.OutOfMemoryError, match=r"^emulated.* out of memory\. Tried to allocate"):
            take(x)
        gc.collect()
        assert used.now() == 0
        assert x.sum().item() == 1024

    check_each(TOO_MUCH, check)


def test_a_memory_limit_is_exact_per_device_without_the_host_and_removable() -> None:
    emulated.set_memory_limit(max(emulated.memory_allocated(0), emulated.memory_allocated(1)) + 4096)
    one, other = torch.empty(1024, device="emulated:0"), torch.empty(1024, device=OTHER)
    for device in (one.device, other.device):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 20, device=device)
    assert torch.ones(100_000).pin_memory().sum() == 100_000
    emulated.set_memory_limit(None)
    assert torch.empty(1 << 20, device=DEVICE).numel() == 1 << 20


def test_a_fraction_of_the_memory_is_a_limit() -> None:
    _, total = emulated.mem_get_info()
    emulated.set_per_process_memory_fraction(0.5)
    assert emulated.mem_get_info()[1] == total // 2
    assert emulated.get_per_process_memory_fraction() == pytest.approx(0.5)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(int(0.6 * total), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="Invalid fraction value: 2"):
        emulated.set_per_process_memory_fraction(2)


def test_memory_that_the_host_does_not_have_is_out_of_memory() -> None:
    refused = emulated.memory_stats()["num_ooms"]
    for make in (torch.empty, torch.zeros):
        with pytest.raises(torch.OutOfMemoryError, match=r"emulated out of memory\. Tried to allocate 37252\.90 GiB"):
            make(10**13, device=DEVICE)
    assert emulated.memory_stats()["num_ooms"] == refused + 2
    emulated.reset_accumulated_memory_stats()
    assert emulated.memory_stats()["num_ooms"] == 0


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


def test_pinned_memory_is_distinguished_from_pageable_memory() -> None:
    def check(entry: tuple[Callable[[], Tensor], bool]) -> None:
        assert entry[0]().is_pinned() is entry[1]

    check_each(PINNED, check)
    blocks, pageable = [torch.ones(16).pin_memory() for _ in range(50)], [torch.ones(16) for _ in range(50)]
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


# Modes: segments, poison, races


def copied_on_a_stream_and_freed(*, record: bool = False, wait: str = "") -> list[float]:
    """Returns what a copy on another stream delivers of a tensor that is freed while it is in flight.

    ``wait``: whether the stream of the tensor waits for the other one "before" or "after" the tensor is freed.
    """
    side, target = emulated.Stream(), pinned(0, 0)
    source = torch.ones(2, device=DEVICE)
    side.wait_stream(emulated.current_stream())
    with emulated.stream(side):
        target.copy_(source, non_blocking=True)
        if record:
            source.record_stream(side)
    if wait == "before":
        emulated.current_stream().wait_stream(side)
    del source
    if wait == "after":
        emulated.current_stream().wait_stream(side)
    torch.empty(2, device=DEVICE)
    side.synchronize()
    return target.tolist()


def test_memory_that_is_freed_while_another_stream_reads_it_is_poisoned() -> None:
    assert copied_on_a_stream_and_freed() == [1, 1]
    emulated.poison_freed_memory()
    try:
        assert all(value != value for value in copied_on_a_stream_and_freed())
        assert copied_on_a_stream_and_freed(record=True) == [1, 1]
        assert copied_on_a_stream_and_freed(wait="before") == [1, 1]
    finally:
        emulated.poison_freed_memory(False)


def test_memory_freed_without_record_stream_is_a_race_when_it_is_reused() -> None:
    with (
        pytest.raises(RuntimeError, match=r"is given out again while copy_ .* reads it.* without record_stream"),
        emulated.race_detection(),
    ):
        copied_on_a_stream_and_freed()
    with emulated.race_detection():
        copied_on_a_stream_and_freed(record=True)
        copied_on_a_stream_and_freed(wait="after")


def kernels_on_two_streams(*, wait: bool) -> None:
    side = emulated.Stream()
    tensor = torch.ones(4, device=DEVICE)
    if wait:
        side.wait_stream(emulated.current_stream())
    with emulated.stream(side):
        tensor.mul_(2)
    emulated.synchronize()


def test_two_kernels_on_streams_that_did_not_wait_are_a_race() -> None:
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


# Two parts of a tensor of 6 x 8 x 4 elements, and whether they have an element in common.
PARTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], bool]] = {
    "halves": (lambda x: x[:3], lambda x: x[3:], False),
    "columns": (lambda x: x[:, :4], lambda x: x[:, 4:], False),
    "columns of a transposed tensor": (lambda x: x.transpose(0, 2)[:, :3], lambda x: x.transpose(0, 2)[:, 3:], False),
    "even and odd": (lambda x: x.view(-1)[::2], lambda x: x.view(-1)[1::2], False),
    "an expanded element and the others": (lambda x: x[0, 0, :1].expand(9), lambda x: x[:, :, 1:], False),
    "columns that overlap": (lambda x: x[:, :5], lambda x: x[:, 4:], True),
    "second and third": (lambda x: x.view(-1)[1::2], lambda x: x.view(-1)[::3], True),
    "a column and all": (lambda x: x[:, 7, 3], lambda x: x, True),
    "windows": (lambda x: x.view(-1)[:32].unfold(0, 3, 1), lambda x: x.view(-1)[31:], True),
}


def test_parts_of_one_memory_race_if_they_have_an_element_in_common() -> None:
    def check(entry: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], bool]) -> None:
        one, other, race = entry
        memory, side = torch.zeros(6, 8, 4, device=DEVICE), emulated.Stream()
        emulated.synchronize()
        other(memory).zero_()
        with emulated.stream(side):
            one(memory).sum()
        emulated.synchronize()
        assert bool(emulated.data_races()) == race

    with emulated.race_detection():
        check_each(PARTS, check)


def test_polling_an_event_or_a_stream_orders_the_host() -> None:
    with emulated.race_detection():
        for poll_the_event in (True, False):
            tensor, event, side = torch.zeros(4, device=DEVICE), emulated.Event(), emulated.Stream()
            emulated.synchronize()
            with emulated.stream(side):
                tensor.add_(1)
                event.record()
            assert (event if poll_the_event else side).query()
            tensor.add_(1)
        emulated.synchronize()


def copy_between_streams(x: Tensor, h: Tensor) -> None:
    h.copy_(x, non_blocking=True)
    with emulated.stream(emulated.Stream()):
        torch.empty_like(x).copy_(h, non_blocking=True)


# What comes after a late copy, and whether it is a race with it.
ON_THE_HOST: dict[str, tuple[Callable[[Tensor, Tensor], Any], bool]] = {
    "overwritten while it is sent": (lambda x, h: (x.copy_(h, non_blocking=True), h.zero_()), True),
    "overwritten while it is received": (lambda x, h: (h.copy_(x, non_blocking=True), h.zero_()), True),
    "read while it is received": (lambda x, h: (h.copy_(x, non_blocking=True), h + 1), True),
    "refilled while it is sent": (lambda x, h: (x.copy_(h, non_blocking=True), h.copy_(torch.ones(8))), True),
    "sent on while it is received": (copy_between_streams, True),
    "read while it is sent": (lambda x, h: (x.copy_(h, non_blocking=True), h + 1), False),
    "another half": (lambda x, h: (h[:4].copy_(x[:4], non_blocking=True), h[4:].zero_()), False),
    "a view of it": (lambda x, h: (h.copy_(x, non_blocking=True), h.view(2, 4)[1].is_pinned()), False),
    "sent on in order": (lambda x, h: (h.copy_(x, non_blocking=True), x.copy_(h, non_blocking=True)), False),
    "waited for": (lambda x, h: (h.copy_(x, non_blocking=True), emulated.synchronize(), h.zero_()), False),
    "filled before": (lambda x, h: (h.fill_(3), x.copy_(h, non_blocking=True)), False),
}


def test_an_operation_on_pinned_memory_races_with_a_copy_in_flight() -> None:
    def check(entry: tuple[Callable[[Tensor, Tensor], Any], bool]) -> None:
        do, race = entry
        x, h = torch.ones(8, device=DEVICE), torch.ones(8).pin_memory()
        emulated.synchronize()
        do(x, h)
        emulated.synchronize()
        assert bool(emulated.data_races()) == race

    with emulated.race_detection():
        check_each(ON_THE_HOST, check)


def test_a_file_that_cannot_be_made_is_a_value_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="cannot open"):
        emulated.share_devices(tmp_path / "missing" / "file")
