"""Memory of the emulated devices, in bytes, under the names that ``torch.cuda`` has for it."""

from __future__ import annotations

import os
from typing import Any

import torch

from fsdp_doctor.emulated.library import _C

_Device = torch.device | str | int | None
_MIB = 2**20


def _index(device: _Device) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return int(_C.current_device()) if index is None else index


def _stats(device: _Device) -> dict[str, int]:
    stats: dict[str, int] = _C.memory_stats(_index(device))
    return stats


def memory_allocated(device: _Device = None) -> int:
    """Memory of the device in tensors now, in multiples of 512 for each, as CUDA's allocator counts."""
    return _stats(device)["allocated"]


def max_memory_allocated(device: _Device = None) -> int:
    """The most that ``memory_allocated`` has been since the last reset."""
    return _stats(device)["peak"]


def memory_reserved(device: _Device = None) -> int:
    """Memory in the segments of the caching allocator; without ``use_caching_allocator`` what is allocated."""
    return _stats(device)["reserved"]


def max_memory_reserved(device: _Device = None) -> int:
    """The most that ``memory_reserved`` has been since the last reset."""
    return _stats(device)["reserved_peak"]


memory_cached = memory_reserved
max_memory_cached = max_memory_reserved


def memory_stats(device: _Device = None) -> dict[str, int]:
    """The counters that are known, under the names that ``torch.cuda.memory_stats`` uses."""
    stats = _stats(device)
    allocated = {"current": stats["allocated"], "peak": stats["peak"]}
    reserved = {"current": stats["reserved"], "peak": stats["reserved_peak"]}
    bytes_by_kind = {"allocated_bytes": allocated, "active_bytes": allocated, "reserved_bytes": reserved}
    counters = {f"{kind}.all.{name}": value for kind, both in bytes_by_kind.items() for name, value in both.items()}
    return counters | {
        "allocation.all.allocated": stats["allocations"],
        "segment.all.current": stats["segments"],
        "inactive_split_bytes.all.current": stats["split"],
        "num_alloc_retries": stats["retries"],
        "num_ooms": stats["refusals"],
    }


def memory_stats_as_nested_dict(device: _Device = None) -> dict[str, Any]:
    """``memory_stats`` with a dictionary for each part of a name."""
    nested: dict[str, Any] = {}
    for name, value in memory_stats(device).items():
        *groups, last = name.split(".")
        at = nested
        for group in groups:
            at = at.setdefault(group, {})
        at[last] = value
    return nested


def memory_summary(device: _Device = None, abbreviated: bool = False) -> str:
    """``memory_stats`` as text, a line for each counter, bytes in MiB."""
    lines = [f"memory of emulated:{_index(device)}"]
    for name, value in memory_stats(device).items():
        lines.append(f"{name:<36} {f'{value / _MIB:.1f} MiB' if 'bytes' in name else value:>14}")
    return "\n".join(lines)


def host_memory_stats() -> dict[str, int]:
    """Pinned host memory, under the name that ``torch.cuda.host_memory_stats`` has for it."""
    return {"allocated_bytes.current": pinned_memory_allocated()}


def pinned_memory_allocated() -> int:
    """Pinned host memory in tensors now."""
    return int(_C.pinned_bytes())


def reset_peak_memory_stats(device: _Device = None) -> None:
    """The peaks are what is allocated and reserved now."""
    _C.reset_peak(_index(device))


reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: _Device = None) -> None:
    """How many allocations, retries and refusals there were is counted from here."""
    _C.reset_accumulated(_index(device))


def empty_cache() -> None:
    """Gives back the segments that hold no tensor; without ``use_caching_allocator`` there are none."""
    _C.empty_cache()


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """(free, total). Without a limit the total is what this host has."""
    free, total = _C.memory_info(_index(device))
    return int(free), int(total)


def set_memory_limit(nbytes: int | None) -> None:
    """From now on an allocation beyond ``nbytes`` on one device raises ``torch.OutOfMemoryError``. None: no limit."""
    _C.set_memory_limit(nbytes or 0)


def share_devices(path: str | os.PathLike[str]) -> None:
    """From now on the devices are those of all processes of this host that share the file ``path``.

    What the others have allocated is not free here: ``mem_get_info`` says so, and a limit is one of all together. The
    file is made where it is not there. Raises RuntimeError when called twice, ValueError for what is no such file.
    """
    _C.share_devices(os.fspath(path))


def set_per_process_memory_fraction(fraction: float, device: _Device = None) -> None:
    """A limit of that part of what a device has, on each device. Raises ValueError outside 0 to 1."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    limit = _stats(device)["limit"]
    if limit:
        _C.set_memory_limit(0)
    _C.set_memory_limit(int(fraction * mem_get_info(device)[1]))


def get_per_process_memory_fraction(device: _Device = None) -> float:
    """The limit as a part of what this host has; 1 without one."""
    limit = _stats(device)["limit"]
    return limit / int(_C.host_bytes()) if limit else 1.0


def get_allocator_backend() -> str:
    """``native``, as that of CUDA that is emulated."""
    return "native"
