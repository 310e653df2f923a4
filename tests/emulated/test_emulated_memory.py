"""The emulated device counts memory, runs out of it, and tells pinned from pageable memory, as CUDA does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulated_device import DEVICE, OTHER, Used, emulated, on_device
from torch import Tensor

pytestmark = pytest.mark.usefixtures("device_as_it_was")


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
