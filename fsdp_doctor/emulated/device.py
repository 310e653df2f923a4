"""``torch.emulated``: what ``torch.cuda`` is to CUDA. PyTorch and its libraries find it under this name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import torch

from fsdp_doctor.emulated.device_memory import (
    empty_cache,
    get_allocator_backend,
    get_per_process_memory_fraction,
    host_memory_stats,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    pinned_memory_allocated,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_memory_stats,
    set_memory_limit,
    set_per_process_memory_fraction,
    share_devices,
)
from fsdp_doctor.emulated.device_modes import (
    copies_in_flight,
    data_races,
    late_completion,
    poison_freed_memory,
    race_detection,
    set_late_completion,
    use_caching_allocator,
)
from fsdp_doctor.emulated.library import _C

__all__ = [
    "copies_in_flight",
    "data_races",
    "empty_cache",
    "get_allocator_backend",
    "get_per_process_memory_fraction",
    "host_memory_stats",
    "late_completion",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "pinned_memory_allocated",
    "poison_freed_memory",
    "race_detection",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "set_late_completion",
    "set_memory_limit",
    "set_per_process_memory_fraction",
    "share_devices",
    "use_caching_allocator",
]

_NAME = "emulated"
_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)
_Device = torch.device | str | int | None


def __getattr__(name: str) -> Any:
    # torch.utils.checkpoint keeps a device's random state only where the device says so by this name.
    if name == "_initialized":
        return is_initialized()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_available() -> bool:
    """Always: the device is host memory."""
    return True


def is_initialized() -> bool:
    """Whether this process has used the device, by a tensor or by ``set_device``; DeviceMesh sets it before that."""
    return bool(_C.is_initialized())


def init() -> None:
    """As the first use. Raises RuntimeError in a process that was forked from one that used the device."""
    _C.initialize()


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return bool(_C.is_in_bad_fork())


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


class device:  # noqa: N801, torch.cuda's name
    """The current device is ``device`` inside; None changes nothing."""

    def __init__(self, device: _Device) -> None:
        self.idx = -1 if device is None else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _exchange_device(self.prev_idx)


class device_of(device):  # noqa: N801, torch.cuda's name
    """The current device is that of a tensor inside; a tensor elsewhere changes nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.get_device() if tensor.device.type == _NAME else None)


def get_device_name(device: _Device = None) -> str:
    """A name for reports."""
    return "emulated accelerator in host memory"


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """What is known of a device, under the names that ``torch.cuda.get_device_properties`` uses; memory in bytes."""

    name: str
    total_memory: int
    major: int
    minor: int
    multi_processor_count: int
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    is_integrated: bool = False
    gcnArchName: str = ""  # noqa: N815, torch.cuda's name


def get_device_properties(device: _Device = None) -> DeviceProperties:
    """The properties of ``device``. Raises AssertionError for a device that does not exist, as CUDA's does."""
    index = _index(device)
    if not 0 <= index < device_count():
        raise AssertionError("Invalid device id")
    major, minor = get_device_capability(index)
    return DeviceProperties(get_device_name(index), mem_get_info(index)[1], major, minor, os.cpu_count() or 1)


def get_device_capability(device: _Device = None) -> tuple[int, int]:
    """That of an H100, (9, 0): what code asks it for is whether there is bfloat16."""
    return 9, 0


def can_device_access_peer(device: _Device, peer_device: _Device) -> bool:
    """No device reads the memory of another."""
    return False


def get_arch_list() -> list[str]:
    """Nothing is compiled for the device."""
    return []


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
        event = super().__new__(cls, _NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)
        event._timed = enable_timing
        return event

    _timed: bool

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Milliseconds on the host's clock between the two records."""
        if not (self._timed and getattr(end_event, "_timed", True)):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        milliseconds: float = _C.milliseconds_between(self.event_id, end_event.event_id)
        return milliseconds


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


class StreamContext:
    """Kernels inside run on ``stream``; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: list[tuple[int, torch.Stream]] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before.append((current_device(), current_stream(self.stream.device)))
            set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            device, there = self._before.pop()
            set_stream(there)
            set_device(device)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Kernels inside run on ``stream``; None changes nothing."""
    return StreamContext(stream)


def is_current_stream_capturing() -> bool:
    """There are no graphs."""
    return False


def _sleep(cycles: int) -> None:
    """A kernel of ``cycles`` nanoseconds on the current stream: who waits for the stream waits for it."""
    _C.sleep(cycles / 1e9)


def synchronize(device: _Device = None) -> None:
    """Waits for every stream of the device: copies that were in flight have happened after it."""
    _C.synchronize_device(_index(device))


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


seed_all = seed


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Sets what ``get_rng_state_all`` gave."""
    for index, state in enumerate(states):
        set_rng_state(state, index)


# Autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What autocast may use."""
    return [torch.bfloat16, torch.float16, torch.float32]


def is_tf32_supported() -> bool:
    """The CPU has no such numbers."""
    return False


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """The CPU computes it."""
    return True
