"""``torch.emulated`` has what FSDP code asks ``torch.cuda`` for."""

from __future__ import annotations

import time

import pytest
import torch
from support.emulated_device import DEVICE, emulated

pytestmark = pytest.mark.usefixtures("device_as_it_was")

# Of CUDA's own machinery, and nothing to emulate: graphs, compilers, libraries, sensors, pools, and types that torch
# makes by the name of the device.
_OF_CUDA_ALONE = {
    *("CUDAGraph", "CudaError", "DeferredCudaCallError", "ExternalStream", "GreenContext", "CUDAPluggableAllocator"),
    *("amp", "graph", "graphs", "graph_pool_handle", "make_graphed_callables", "jiterator", "nccl", "nvtx", "tunable"),
    *("caching_allocator_alloc", "caching_allocator_delete", "caching_allocator_disabled", "caching_allocator_enable"),
    *(
        "change_current_allocator",
        "check_error",
        "cudaStatus",
        "cudart",
        "current_blas_handle",
        "current_solver_handle",
    ),
    *("get_gencode_flags", "get_stream_from_external", "has_half", "has_magma", "MemPool", "use_mem_pool"),
    *("temperature", "power_draw", "clock_rate", "utilization", "memory_usage", "device_memory_used"),
    *("memory", "profiler", "random", "sparse", "streams", "default_generators", "ipc_collect", "list_gpu_processes"),
    *("memory_snapshot", "get_sync_debug_mode", "set_sync_debug_mode", "host_memory_stats_as_nested_dict"),
    *("reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats"),
}


def test_every_other_name_of_torch_cuda_is_there() -> None:
    names = {name for name in torch.cuda.__all__ if not name.endswith(("Storage", "Tensor"))}
    assert {name for name in names if not hasattr(emulated, name)} <= _OF_CUDA_ALONE


def test_the_properties_of_a_device_are_known() -> None:
    emulated.set_memory_limit(2**30)
    properties = emulated.get_device_properties("emulated:1")
    assert (properties.name, properties.total_memory) == (emulated.get_device_name(), 2**30)
    assert (properties.major, properties.minor) == emulated.get_device_capability() == (9, 0)
    with pytest.raises(AssertionError, match="Invalid device id"):
        emulated.get_device_properties(99)


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


def test_memory_statistics_have_the_names_of_cuda() -> None:
    held = torch.empty(1000, device=DEVICE)
    stats = emulated.memory_stats()
    assert stats["active_bytes.all.current"] == stats["allocated_bytes.all.current"] == emulated.memory_allocated()
    assert emulated.memory_stats_as_nested_dict()["active_bytes"]["all"]["peak"] == stats["active_bytes.all.peak"]
    assert "active_bytes.all.current" in emulated.memory_summary()
    del held


def test_a_stream_context_goes_back_to_where_it_was() -> None:
    before, side = emulated.current_stream(), emulated.Stream()
    with emulated.StreamContext(side):
        assert emulated.current_stream() == side
    with emulated.device_of(torch.ones(1, device="emulated:1")):
        assert emulated.current_device() == 1
    assert (emulated.current_stream(), emulated.current_device()) == (before, 0)


def test_a_sleep_takes_its_time_for_who_waits_for_it() -> None:
    begin, end = (emulated.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    begin.record()
    emulated._sleep(50_000_000)
    end.record()
    assert not end.query()
    assert time.perf_counter() - start < 0.04
    end.synchronize()
    assert time.perf_counter() - start >= 0.05
    assert end.query()
    assert 50 <= begin.elapsed_time(end) < 500


def test_a_stream_that_waits_for_a_sleeping_one_sleeps_too() -> None:
    side = emulated.Stream()
    with emulated.stream(side):
        emulated._sleep(30_000_000)
    emulated.current_stream().wait_stream(side)
    start = time.perf_counter()
    emulated.current_stream().synchronize()
    assert time.perf_counter() - start > 0.02


def test_events_without_timing_have_no_elapsed_time() -> None:
    one, other = emulated.Event(), emulated.Event(enable_timing=True)
    with pytest.raises(ValueError, match="enable_timing=True"):
        one.elapsed_time(other)
    with pytest.raises(RuntimeError, match="Both events must be recorded before calculating elapsed time"):
        emulated.Event(enable_timing=True).elapsed_time(other)


def test_an_index_beyond_the_end_is_an_assertion_on_the_device() -> None:
    beyond = torch.tensor([7], device=DEVICE)
    table = torch.ones(3, 2, device=DEVICE)
    for read in (
        lambda: table[beyond],
        lambda: table.index_select(0, beyond),
        lambda: table.gather(0, beyond[:, None]),
        lambda: torch.nn.functional.embedding(beyond, table),
    ):
        with pytest.raises(torch.AcceleratorError, match="device-side assert triggered"):
            read()
    with pytest.raises(IndexError):
        table[7]


def test_a_host_tensor_indexed_by_the_device_is_refused_in_the_words_of_cuda() -> None:
    with pytest.raises(RuntimeError, match=r"indices should be either on cpu or on the same device .*\(cpu\)"):
        torch.ones(3)[torch.tensor([1], device=DEVICE)]
