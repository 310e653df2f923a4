"""Streams, events, several devices and random numbers, under the names that FSDP code asks ``torch.cuda`` for."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.emulated_device import BF16, DEVICE, OTHER, Used, emulated, on_device, pinned
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("device_as_it_was")

# Of CUDA's own machinery, and nothing to emulate: graphs, compilers, libraries, sensors, pools. Their types are there.
_OF_CUDA_ALONE = {
    *("graphs", "graph_pool_handle", "make_graphed_callables", "jiterator", "nccl", "nvtx", "tunable"),
    *("caching_allocator_alloc", "caching_allocator_delete", "caching_allocator_disabled", "caching_allocator_enable"),
    *("change_current_allocator", "check_error", "cudart", "current_blas_handle", "ipc_collect"),
    *("get_gencode_flags", "get_stream_from_external", "has_half", "has_magma", "use_mem_pool"),
    *("temperature", "power_draw", "clock_rate", "utilization", "memory_usage", "device_memory_used"),
    *("profiler", "sparse", "streams", "default_generators", "list_gpu_processes"),
    *("get_sync_debug_mode", "set_sync_debug_mode", "host_memory_stats_as_nested_dict"),
    *("reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats", "current_solver_handle"),
}


def test_every_other_name_of_torch_cuda_is_there() -> None:
    names = {name for name in torch.cuda.__all__ if not name.endswith(("Storage", "Tensor"))}
    assert {name for name in names if not hasattr(emulated, name)} <= _OF_CUDA_ALONE


def test_types_of_cuda_alone_can_be_named_and_not_made() -> None:
    assert issubclass(type("Pool", (emulated.MemPool,), {}), emulated.MemPool)
    assert emulated.CUDAGraph | None
    assert not isinstance(torch.ones(1, device=DEVICE), emulated.CUDAGraph)
    with pytest.raises(RuntimeError):
        emulated.CUDAGraph()
    assert issubclass(emulated.CudaError, RuntimeError)


def test_the_modules_of_torch_cuda_have_counterparts() -> None:
    for name in ("amp", "memory", "random"):
        module = importlib.import_module(f"torch.emulated.{name}")
        names = getattr(torch.cuda, name).__all__
        assert {each for each in names if not hasattr(module, each)} <= _OF_CUDA_ALONE
    with torch.emulated.amp.autocast(dtype=BF16):
        assert (torch.ones(2, 2, device=DEVICE) @ torch.ones(2, 2, device=DEVICE)).dtype == BF16
    assert torch.emulated.amp.GradScaler().is_enabled()


def test_the_properties_of_a_device_are_known() -> None:
    emulated.set_memory_limit(2**30)
    properties = emulated.get_device_properties("emulated:1")
    assert (properties.name, properties.total_memory) == (emulated.get_device_name(), 2**30)
    assert (properties.major, properties.minor) == emulated.get_device_capability() == (9, 0)
    with pytest.raises(AssertionError, match="Invalid device id"):
        emulated.get_device_properties(99)


# Streams and events


def test_streams_are_those_of_torch_and_distinct() -> None:
    streams = [emulated.Stream() for _ in range(40)]
    assert len({stream.stream_id for stream in streams}) == 40
    assert emulated.default_stream() not in streams
    assert emulated.current_stream() == emulated.default_stream() == torch.accelerator.current_stream()
    stream, event = torch.Stream(device=DEVICE), torch.Event(device=DEVICE)
    assert isinstance(streams[0], torch.Stream)
    assert isinstance(emulated.Event(), torch.Event)
    assert stream.device == torch.device("emulated", 0)
    assert stream.record_event(event) is event or event.query()
    assert isinstance(emulated.current_stream(), emulated.Stream)
    assert isinstance(emulated.default_stream(1), emulated.Stream)
    recorded = emulated.Event()
    assert emulated.current_stream().record_event(recorded) is recorded
    streams[0].wait_event(recorded)
    assert recorded.query()
    on_device(1).record_stream(stream)


def test_a_stream_is_current_inside_its_context_with_its_device() -> None:
    stream = emulated.Stream(device=1)
    for context in (emulated.stream(stream), emulated.StreamContext(stream), stream):
        with context:
            assert (emulated.current_device(), emulated.current_stream(1)) == (1, stream)
            assert torch.ones(1, device=DEVICE).device.index == 1
            with emulated.stream(None):
                emulated.set_stream(None)
                assert emulated.current_stream() == stream
        assert (emulated.current_device(), emulated.current_stream(1)) == (0, emulated.default_stream(1))


def test_each_thread_has_a_current_stream_and_device_of_its_own() -> None:
    seen: list[Any] = []
    emulated.set_device(1)
    with emulated.Stream(device=1):
        thread = threading.Thread(target=lambda: seen.extend((emulated.current_device(), emulated.current_stream(1))))
        thread.start()
        thread.join()
    assert seen == [0, emulated.default_stream(1)]


def test_an_event_stands_for_its_last_record() -> None:
    event, here = torch.Event(device=DEVICE), pinned(0)
    assert event.query()
    event.synchronize()
    emulated.current_stream().wait_event(event)
    event.record()
    here.copy_(on_device(1), non_blocking=True)
    event.record()
    event.synchronize()
    assert here.item() == 1


def test_time_between_events_goes_forward() -> None:
    events = [torch.Event(device=DEVICE, enable_timing=True) for _ in range(3)]
    for event in events:
        event.record()
        torch.ones(1000, device=DEVICE).sort()
    assert 0 < events[0].elapsed_time(events[1]) < events[0].elapsed_time(events[2])
    assert events[1].elapsed_time(events[0]) < 0


def test_events_without_timing_have_no_elapsed_time() -> None:
    one, other = emulated.Event(), emulated.Event(enable_timing=True)
    with pytest.raises(ValueError, match="enable_timing=True"):
        one.elapsed_time(other)
    with pytest.raises(RuntimeError, match="Both events must be recorded before calculating elapsed time"):
        emulated.Event(enable_timing=True).elapsed_time(other)


def test_a_sleep_takes_its_time_for_who_waits_for_it() -> None:
    begin, end, side = emulated.Event(enable_timing=True), emulated.Event(enable_timing=True), emulated.Stream()
    start = time.perf_counter()
    with emulated.stream(side):
        begin.record()
        emulated._sleep(50_000_000)
        end.record()
    assert not end.query()
    emulated.current_stream().wait_stream(side)
    emulated.current_stream().synchronize()
    assert time.perf_counter() - start >= 0.05
    assert end.query()
    assert begin.elapsed_time(end) >= 50


# Several devices in one process


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


def test_results_and_gradients_stay_on_the_device_of_their_inputs() -> None:
    x = on_device(1, 2, device=OTHER)
    results = [x + 1, x.sum(), x[0], torch.cat([x, x]), torch._foreach_add([x], 1)[0], torch.zeros_like(x), x.clone()]
    assert {result.device for result in results} == {torch.device(OTHER)}
    x.requires_grad_()
    (x.to("emulated:0") * 3).sum().backward()
    assert x.grad is not None
    assert (x.grad.device, x.grad.tolist()) == (torch.device(OTHER), [3, 3])
    with pytest.raises(RuntimeError, match="assign"):
        x.grad = torch.ones(2)


def test_a_device_can_be_made_the_current_one() -> None:
    of_a_tensor = emulated.device_of(on_device(1, device=OTHER))
    for context in (emulated.device(1), torch.device(OTHER), torch.accelerator.device_index(1), of_a_tensor):
        with context:
            names = {} if emulated.current_device() == 0 else {"device": DEVICE}
            made = [torch.ones(1, **names), torch.empty(1, **names), torch.tensor([1.0], **names)]
        assert {tensor.device for tensor in made} == {torch.device(OTHER)}
        assert emulated.current_device() == 0


def test_a_device_that_does_not_exist_is_refused() -> None:
    for index in (8, 63, 64, 100):
        for use in (
            lambda: torch.empty(1, device=f"emulated:{index}"),  # noqa: B023
            lambda: torch.ones(1).to(f"emulated:{index}"),  # noqa: B023
            lambda: emulated.set_device(index),  # noqa: B023
        ):
            with pytest.raises(RuntimeError, match="invalid device ordinal"):
                use()


# Autograd, checkpoints, random numbers


def gradients(model: torch.nn.Module, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(9)
    forward(torch.ones(3, 8, device=DEVICE, requires_grad=True)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_a_checkpoint_draws_the_same_random_numbers_again() -> None:
    torch.manual_seed(2)
    linear, dropout = torch.nn.Linear(8, 16), torch.nn.Dropout(0.5)
    model = torch.nn.Sequential(linear, dropout, torch.nn.SiLU(), torch.nn.Linear(16, 4)).to(DEVICE)
    plain = gradients(model, model)
    for reentrant in (False, True):
        again = gradients(model, lambda x: checkpoint(model, x, use_reentrant=reentrant))  # noqa: B023
        assert len(again) == 4
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


def test_the_random_state_is_16_host_bytes_and_restores_the_numbers() -> None:
    torch.manual_seed(4)
    torch.randn(3, device=DEVICE)
    state = emulated.get_rng_state()
    assert (state.shape, state.dtype, state.device.type) == ((16,), torch.uint8, "cpu")
    first = torch.randn(5, device=DEVICE)
    assert not torch.equal(state, emulated.get_rng_state())
    emulated.set_rng_state(state)
    assert torch.equal(torch.randn(5, device=DEVICE), first)
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
