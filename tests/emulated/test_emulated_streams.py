"""Streams, events and several devices in one process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulated_device import DEVICE, OTHER, Used, emulated, on_device, pinned
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("device_as_it_was")


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
