"""``torch.emulated.memory``, the counterpart of ``torch.cuda.memory``, with the counters of ``torch.accelerator``."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_doctor.emulated.device.index import Device, find_index
from fsdp_doctor.emulated.library import _C

__all__ = [
    *("CUDAPluggableAllocator", "MemPool"),
    *("empty_cache", "get_allocator_backend", "get_per_process_memory_fraction", "host_memory_stats"),
    *("max_memory_allocated", "max_memory_cached", "max_memory_reserved", "mem_get_info", "memory_allocated"),
    *("memory_cached", "memory_reserved", "memory_snapshot", "memory_stats", "memory_stats_as_nested_dict"),
    *("memory_summary", "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("reset_peak_memory_stats", "set_per_process_memory_fraction"),
]

_MIB = 2**20

# Types that exist only for CUDA, but that annotations and base classes name.
CUDAPluggableAllocator = torch.cuda.CUDAPluggableAllocator
MemPool = torch.cuda.MemPool

empty_cache = _C.empty_cache


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """Returns ``memory_stats`` as nested dictionaries, one level for each part of a name."""
    nested: dict[str, Any] = torch._C._accelerator_getDeviceStats(find_index(device))
    return nested


def memory_stats(device: Device = None) -> dict[str, Any]:
    """Returns the counters of ``torch.cuda.memory_stats``, under the same names."""
    return torch.accelerator.memory_stats(find_index(device))


def memory_allocated(device: Device = None) -> int:
    """Returns the bytes that tensors on the device use now. As with CUDA, each tensor counts as a multiple of 512."""
    return int(memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"])


def max_memory_allocated(device: Device = None) -> int:
    """Returns the maximum of ``memory_allocated`` since the last reset."""
    return int(memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"])


def memory_reserved(device: Device = None) -> int:
    """Returns the bytes in the caching allocator's segments.

    Without ``use_caching_allocator``, they are equal to ``memory_allocated``.
    """
    return int(memory_stats_as_nested_dict(device)["reserved_bytes"]["all"]["current"])


def max_memory_reserved(device: Device = None) -> int:
    """Returns the maximum of ``memory_reserved`` since the last reset."""
    return int(memory_stats_as_nested_dict(device)["reserved_bytes"]["all"]["peak"])


memory_cached = memory_reserved
max_memory_cached = max_memory_reserved


def memory_snapshot() -> list[dict[str, Any]]:
    """Returns the segments of all devices with their blocks, like ``torch.cuda.memory_snapshot``, without stacks.

    Without ``use_caching_allocator``, the memory of every tensor is a segment with one block. With
    ``use_caching_allocator``, the addresses are addresses of emulated segments, which contain no memory.
    """
    segments: list[dict[str, Any]] = _C.memory_segments()
    return segments


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """Formats ``memory_stats`` as text, one line for each counter, with bytes in MiB."""
    lines = [f"memory of emulated:{find_index(device)}"]
    for name, value in memory_stats(device).items():
        lines.append(f"{name:<36} {f'{value / _MIB:.1f} MiB' if 'bytes' in name else value:>14}")
    return "\n".join(lines)


def host_memory_stats() -> dict[str, int]:
    """Returns the bytes of pinned host memory that CUDA's allocator would have reserved, under the key that torch.cuda
    uses.

    CUDA's allocator rounds each tensor up to a power of two, and keeps the memory for reuse when the tensor is freed.
    """
    return {"allocated_bytes.current": _C.pinned_reserved()}


def reset_peak_memory_stats(device: Device = None) -> None:
    """Resets the peaks to the current values."""
    torch.accelerator.reset_peak_memory_stats(find_index(device))


reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Resets to zero the counts since the start: allocated and freed bytes, retries, out-of-memory errors."""
    torch.accelerator.reset_accumulated_memory_stats(find_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Returns (free, total) bytes of ``device``. The total is the host's memory if no limit is set."""
    return torch.accelerator.get_memory_info(find_index(device))


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limits each device to this fraction of the host's memory. Raises ValueError if it is not between 0 and 1."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _C.set_memory_limit(int(fraction * _C.host_bytes()))


def get_per_process_memory_fraction(device: Device = None) -> float:
    """Returns the limit as a fraction of the host's memory; 1 without a limit."""
    return float((_C.memory_limit() or _C.host_bytes()) / _C.host_bytes())


def get_allocator_backend() -> str:
    """Returns ``native``, the name of the CUDA allocator that is emulated."""
    return "native"
