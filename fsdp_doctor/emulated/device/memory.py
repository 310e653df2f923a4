"""``torch.emulated.memory``, the counterpart of ``torch.cuda.memory``: bytes, as ``torch.accelerator`` counts them."""

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

# Types of CUDA alone, which annotations and base classes name.
CUDAPluggableAllocator = torch.cuda.CUDAPluggableAllocator
MemPool = torch.cuda.MemPool

empty_cache = _C.empty_cache


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """``memory_stats`` as nested dictionaries, one level for each part of a name."""
    nested: dict[str, Any] = torch._C._accelerator_getDeviceStats(find_index(device))
    return nested


def memory_stats(device: Device = None) -> dict[str, Any]:
    """The counters of ``torch.cuda.memory_stats``, under the same names."""
    return torch.accelerator.memory_stats(find_index(device))


def memory_allocated(device: Device = None) -> int:
    """Bytes that tensors of the device take now, each rounded up to a multiple of 512 as CUDA's allocator does."""
    return int(memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"])


def max_memory_allocated(device: Device = None) -> int:
    """The maximum of ``memory_allocated`` since the last reset."""
    return int(memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"])


def memory_reserved(device: Device = None) -> int:
    """Bytes in the caching allocator's segments; equal to ``memory_allocated`` without ``use_caching_allocator``."""
    return int(memory_stats_as_nested_dict(device)["reserved_bytes"]["all"]["current"])


def max_memory_reserved(device: Device = None) -> int:
    """The maximum of ``memory_reserved`` since the last reset."""
    return int(memory_stats_as_nested_dict(device)["reserved_bytes"]["all"]["peak"])


memory_cached = memory_reserved
max_memory_cached = max_memory_reserved


def memory_snapshot() -> list[dict[str, Any]]:
    """The segments of all devices and their blocks, as ``torch.cuda.memory_snapshot`` has them, without stacks.

    Without ``use_caching_allocator`` every tensor's memory is a segment of one block. With it the addresses are those
    of the emulated segments, in which no memory lies.
    """
    segments: list[dict[str, Any]] = _C.memory_segments()
    return segments


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """``memory_stats`` as text: one line for each counter, bytes in MiB."""
    lines = [f"memory of emulated:{find_index(device)}"]
    for name, value in memory_stats(device).items():
        lines.append(f"{name:<36} {f'{value / _MIB:.1f} MiB' if 'bytes' in name else value:>14}")
    return "\n".join(lines)


def host_memory_stats() -> dict[str, int]:
    """Bytes of pinned host memory that CUDA's allocator would have taken, under the name of ``torch.cuda``: a power of
    two for each tensor, kept for the next one when it is freed.
    """
    return {"allocated_bytes.current": _C.pinned_reserved()}


def reset_peak_memory_stats(device: Device = None) -> None:
    """Set the peaks to what there is now."""
    torch.accelerator.reset_peak_memory_stats(find_index(device))


reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Set what is counted since the start to zero: allocated, freed, retries, out-of-memory errors."""
    torch.accelerator.reset_accumulated_memory_stats(find_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Bytes (free, total) of ``device``; the total is the host's memory if no limit is set."""
    return torch.accelerator.get_memory_info(find_index(device))


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limit each device to this fraction of the host's memory. Raises ValueError outside 0 to 1."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _C.set_memory_limit(int(fraction * _C.host_bytes()))


def get_per_process_memory_fraction(device: Device = None) -> float:
    """The limit as a fraction of the host's memory; 1 without a limit."""
    return float((_C.memory_limit() or _C.host_bytes()) / _C.host_bytes())


def get_allocator_backend() -> str:
    """``native``: the name of the CUDA allocator that is emulated."""
    return "native"
