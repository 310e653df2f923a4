"""``torch.emulated``: what ``torch.cuda`` is to CUDA. PyTorch and its libraries find it under this name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fsdp_doctor.emulated.library import _C

_NAME = "emulated"
_TYPE = torch.Stream(device=_NAME).device_type
_Device = torch.device | str | int | None


# torch.utils.checkpoint keeps a device's random state only where the device says so by this name.
_initialized = True


def is_available() -> bool:
    """Always: the device is host memory."""
    return True


def is_initialized() -> bool:
    """Always: there is nothing to initialize."""
    return True


def _lazy_init() -> None:
    """Nothing; without it torch 2.10 thinks the device unused, and its accelerator.synchronize() does nothing."""


def init() -> None:
    """Nothing to do; for symmetry with ``torch.cuda.init``."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """How many devices a process sees; their memory is apart, their arithmetic is the same CPU."""
    count: int = _C.device_count()
    return count


def current_device() -> int:
    """The index of the device that this thread uses."""
    index: int = _C.current_device()
    return index


def set_device(device: _Device) -> None:
    """Makes ``device`` the current one of this thread."""
    _C.exchange_device(_index(device))


def _exchange_device(device: int) -> int:
    previous: int = _C.exchange_device(device)
    return previous


_maybe_exchange_device = _exchange_device


@contextlib.contextmanager
def device(device: _Device) -> Iterator[None]:
    """The current device is ``device`` inside; None changes nothing."""
    previous = _exchange_device(-1 if device is None else _index(device))
    try:
        yield
    finally:
        _exchange_device(previous)


def get_device_name(device: _Device = None) -> str:
    """A name for reports."""
    return "emulated accelerator in host memory"


def _index(device: _Device) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return current_device() if index is None else index


# Streams and events


class Stream(torch.Stream):
    """A stream of an emulated device, the current one by default."""

    def __new__(cls, device: _Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, torch.device(_NAME, _index(device)), priority=priority)


class Event(torch.Event):
    """An event on a stream of an emulated device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, _NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device: _Device = None) -> torch.Stream:
    """The stream that kernels of this thread run on."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: _Device = None) -> torch.Stream:
    """The stream of a thread that chose none."""
    return Stream(stream_id=0, device_index=_index(device), device_type=_TYPE)


def set_stream(stream: torch.Stream | None) -> None:
    """Makes ``stream`` the current one of its device, and its device the current one."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Kernels inside run on ``stream``; None changes nothing."""
    if stream is None:
        yield
        return
    device, there = current_device(), current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(there)
        set_device(device)


def synchronize(device: _Device = None) -> None:
    """Waits for every stream of the device: copies that were in flight have happened after it."""
    _C.synchronize_device(_index(device))


# Memory, in bytes


def memory_allocated(device: _Device = None) -> int:
    """Memory of the device in tensors now, in multiples of 512 for each, as CUDA's allocator counts."""
    return int(_C.memory_stats(_index(device))["allocated"])


def max_memory_allocated(device: _Device = None) -> int:
    """The most that ``memory_allocated`` has been since the last reset."""
    return int(_C.memory_stats(_index(device))["peak"])


# Nothing is cached, so nothing is reserved beyond what is allocated.
memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def memory_stats(device: _Device = None) -> dict[str, int]:
    """The counters under the names that ``torch.cuda.memory_stats`` uses."""
    stats = _C.memory_stats(_index(device))
    return {
        "allocated_bytes.all.current": stats["allocated"],
        "allocated_bytes.all.peak": stats["peak"],
        "allocation.all.allocated": stats["allocations"],
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def reset_peak_memory_stats(device: _Device = None) -> None:
    """The peak is what is allocated now."""
    _C.reset_peak(_index(device))


def empty_cache() -> None:
    """Nothing to do: memory is given back when a tensor is freed."""


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """(free, total). Without a limit the total is what this host has."""
    free, total = _C.memory_info(_index(device))
    return int(free), int(total)


def set_memory_limit(nbytes: int | None) -> None:
    """From now on an allocation beyond ``nbytes`` on one device raises ``torch.OutOfMemoryError``. None: no limit."""
    _C.set_memory_limit(nbytes or 0)


def pinned_memory_allocated() -> int:
    """Pinned host memory in tensors now."""
    return int(_C.pinned_bytes())


# Late completion


def set_late_completion(late: bool) -> None:
    """Whether a non-blocking copy finishes as late as its contract allows (the default) or at once."""
    _C.set_late(late)


def late_completion() -> bool:
    """Whether non-blocking copies are late."""
    return bool(_C.is_late())


def copies_in_flight() -> int:
    """How many non-blocking copies were issued in this process and have not happened yet."""
    return int(_C.copies_in_flight())


# Random numbers


def _generator(device: _Device) -> torch.Generator:
    generator: torch.Generator = _C.default_generator(_index(device))
    return generator


def manual_seed(seed: int) -> None:
    """Seeds the current device's generator."""
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds every device's generator."""
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def seed() -> int:
    """Seeds the current device's generator with what the system has."""
    return _generator(None).seed()


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return _generator(None).initial_seed()


def get_rng_state(device: _Device = _NAME) -> torch.Tensor:
    """Seed and offset: 16 bytes, on the CPU, as CUDA's."""
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: _Device = _NAME) -> None:
    """Sets what ``get_rng_state`` gave."""
    _generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of each device."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Sets what ``get_rng_state_all`` gave."""
    for index, state in enumerate(states):
        set_rng_state(state, index)


# Autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What autocast may use."""
    return [torch.bfloat16, torch.float16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """The CPU computes it."""
    return True
