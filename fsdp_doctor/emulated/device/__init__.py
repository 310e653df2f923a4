"""``torch.emulated``, the counterpart of ``torch.cuda``: PyTorch and its libraries find the device's functions here."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import itertools
import os
import pathlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from fsdp_doctor.emulated import shared_memory
from fsdp_doctor.emulated.device import amp as amp
from fsdp_doctor.emulated.device.index import NAME, Device, find_index
from fsdp_doctor.emulated.device.memory import *  # noqa: F403
from fsdp_doctor.emulated.device.memory import mem_get_info
from fsdp_doctor.emulated.device.random import *  # noqa: F403
from fsdp_doctor.emulated.library import _C

_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)

# Functions of torch.cuda that the library implements directly.
init = _lazy_init = _C.initialize  # as the first use does; RuntimeError in a fork of a process that has used the device
is_initialized = _C.is_initialized
_is_in_bad_fork = _C.is_in_bad_fork
device_count = _C.device_count
current_device = _C.current_device
_exchange_device = _maybe_exchange_device = _C.exchange_device
# Functions that only the emulated device has.
pinned_memory_allocated = _C.pinned_bytes  # of tensors, in bytes
late_completion = _C.is_late
copies_in_flight = _C.copies_in_flight  # non-blocking copies of this process that have not happened yet

# Annotations, base classes, isinstance checks and except clauses name these types, also in modules that never make an
# instance. A torch without CUDA has all of them, but raises when an instance is made.
_TYPES_OF_CUDA_ALONE = frozenset(
    {"CUDAGraph", "CudaError", "DeferredCudaCallError", "ExternalStream", "GreenContext", "cudaStatus", "graph"}
)


def __getattr__(name: str) -> Any:
    # torch.utils.checkpoint reads this name, and keeps the device's random state only if it is true.
    if name == "_initialized":
        return is_initialized()
    if name in _TYPES_OF_CUDA_ALONE:
        return getattr(torch.cuda, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_available() -> bool:
    """Returns True, because the device is host memory."""
    return True


def _lazy_call(callable: Callable[[], object], **_: object) -> None:
    """Initializes the device and calls ``callable`` at once; torch.cuda delays the call until CUDA is first used."""
    _lazy_init()
    callable()


def set_device(device: Device) -> None:
    """Makes ``device`` the current device of this thread."""
    _C.exchange_device(find_index(device))


class device:  # noqa: N801, torch.cuda's name
    """Context in which ``device`` is the current device. None changes nothing."""

    def __init__(self, device: Device) -> None:
        self.idx = -1 if device is None else find_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _exchange_device(self.prev_idx)


class device_of(device):  # noqa: N801, torch.cuda's name
    """Context in which the device of ``tensor`` is the current device.

    A tensor on another type of device changes nothing.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.get_device() if tensor.device.type == NAME else None)


def get_device_name(device: Device = None) -> str:
    """Returns the name under which reports show the device."""
    return "emulated accelerator in host memory"


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """The properties that ``torch.cuda.get_device_properties`` returns, under the same names. Memory is in bytes."""

    name: str
    total_memory: int
    major: int
    minor: int
    multi_processor_count: int
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    is_integrated: bool = False
    gcnArchName: str = ""  # noqa: N815, torch.cuda's name


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Returns the properties of ``device``. Raises AssertionError, as CUDA does, if there is no such device."""
    index = find_index(device)
    if not 0 <= index < device_count():
        raise AssertionError("Invalid device id")
    major, minor = get_device_capability(index)
    return DeviceProperties(get_device_name(index), mem_get_info(index)[1], major, minor, os.cpu_count() or 1)


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Returns (9, 0), the capability of an H100, so that callers find that bfloat16 is supported."""
    return 9, 0


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Returns False, because no device can read the memory of another."""
    return False


def get_arch_list() -> list[str]:
    """Returns an empty list, because nothing is compiled for the device."""
    return []


# Streams and events


class Stream(torch.Stream):
    """A stream of an emulated device; by default, one of the current device."""

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, torch.device(NAME, find_index(device)), priority=priority)

    # The methods of torch.Stream do not accept a subclass of torch.Event.

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Records ``event``, or a new event, after all work that is already on the stream. Returns the event."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: torch.Event) -> None:
        """Makes later work on the stream wait for ``event``."""
        event.wait(self)


class Event(torch.Event):
    """An event on a stream of an emulated device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        event = super().__new__(cls, NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)
        event._timed = enable_timing
        return event

    _timed: bool

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Returns the milliseconds from the record of this event to the record of ``end_event``, on the
        host's clock.
        """
        if not (self._timed and getattr(end_event, "_timed", True)):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        milliseconds: float = _C.milliseconds_between(self.event_id, end_event.event_id)
        return milliseconds


def current_stream(device: Device = None) -> Stream:
    """Returns the stream on which this thread launches kernels."""
    current = torch.accelerator.current_stream(find_index(device))
    return Stream(stream_id=current.stream_id, device_index=current.device_index, device_type=_TYPE)


def default_stream(device: Device = None) -> Stream:
    """Returns the stream that is current in a thread that has set no other stream."""
    return Stream(stream_id=0, device_index=find_index(device), device_type=_TYPE)


def set_stream(stream: torch.Stream | None) -> None:
    """Makes ``stream`` and its device the current ones. None changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Context in which kernels are launched on ``stream``. None changes nothing."""

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
    """Returns a context in which kernels are launched on ``stream``. None changes nothing."""
    return StreamContext(stream)


def is_current_stream_capturing() -> bool:
    """Returns False, because CUDA graphs are not emulated."""
    return False


def _sleep(cycles: int) -> None:
    """Launches a kernel that takes ``cycles`` nanoseconds on the current stream."""
    _C.sleep(cycles / 1e9)


def synchronize(device: Device = None) -> None:
    """Waits for all streams of ``device``, including the copies in flight."""
    _C.synchronize_device(find_index(device))


# Autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Returns the dtypes in which autocast can compute."""
    return [torch.bfloat16, torch.float16, torch.float32]


def is_tf32_supported() -> bool:
    """Returns False, because the CPU has no TF32."""
    return False


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Returns True, because the CPU can compute in bfloat16."""
    return True


def set_memory_limit(nbytes: int | None) -> None:
    """Makes allocations beyond ``nbytes`` on one device raise ``torch.OutOfMemoryError``. None removes the limit."""
    _C.set_memory_limit(nbytes or 0)


def share_devices(path: str | os.PathLike[str]) -> None:
    """Shares the devices' memory with all processes of this host that pass the same ``path``.

    ``mem_get_info`` and the memory limit then count the allocations of all these processes. The file is created if it
    does not exist. Raises RuntimeError if called twice, and ValueError if the file cannot be used.
    """
    _C.share_devices(os.fspath(path))


# Strictness of the devices


def set_late_completion(late: bool) -> None:
    """Makes non-blocking copies finish as late as their contract allows (the default), or immediately."""
    _C.set_late(late)


def use_caching_allocator(use: bool = True) -> None:
    """Makes the device reserve memory in segments that are split and cached by stream, like CUDA's caching allocator;
    off by default.

    ``memory_reserved`` and ``inactive_split_bytes`` are then counted, and a memory limit applies to reserved memory.
    Raises RuntimeError while there are tensors on a device.
    """
    _C.set_caching(use)


def poison_freed_memory(poison: bool = True) -> None:
    """Fills memory with NaNs when it is freed. Off by default.

    A copy to the host that is in flight then delivers NaNs, because a GPU could already have reused the memory. The
    copy is safe if it is on the stream on which the memory was allocated, if this stream waits for the copy, or if
    ``record_stream`` was called.
    """
    _C.set_poisoning(poison)


@contextlib.contextmanager
def race_detection() -> Iterator[None]:
    """Context that raises RuntimeError at its end if threads of the process had data races.

    The message has a line for each race.

    A race is two accesses to the same bytes, at least one of them a write: on two streams that are not ordered, or by a
    copy in flight and by the host in pinned memory. Memory that may be reallocated while another stream still uses it
    without ``record_stream`` counts as a race, too.
    """
    _C.set_race_detection(True)
    try:
        yield
        races = data_races()
    finally:
        _C.set_race_detection(False)
    if races:
        raise RuntimeError("\n".join([f"{len(races)} data race(s):", *races]))


def data_races() -> list[str]:
    """Returns the races that ``race_detection`` has found since the last call, one sentence each."""
    races: list[str] = _C.take_races()
    return races


# Collectives


def make_backend(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> dist.Backend:
    """Makes the backend of a process group of ``size`` ranks, which meet over ``store``.

    Every rank of the group must call it. The group may be the default group or another.
    """
    store = dist.PrefixStore("emulated", store)
    host = dist.ProcessGroupGloo(store, rank, size, timeout)
    file = shared_memory.open_for_group(store, rank, size, _C.shared_bytes(size))
    if rank == 0:
        store.set("name", secrets.token_hex(3))
    backend: dist.Backend = _C.make_backend(host, file, store.get("name").decode(), timeout, make_backend)
    return backend


@contextlib.contextmanager
def note_launch_order(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Context in which the collectives of this process are logged in ``directory``, for :func:`find_order_cycle`.

    If several processes use the same directory and the same device, their collectives are logged in the order of their
    launches. Raises OSError if the directory cannot be made.
    """
    os.makedirs(directory, exist_ok=True)
    _C.log_launches(os.fspath(directory))
    try:
        yield
    finally:
        _C.log_launches("")


def find_order_cycle(directory: str | os.PathLike[str]) -> str:
    """Describes launch orders in which devices wait for one another's collectives; empty if no devices do.

    The result is exact under these assumptions: a device runs one collective at a time, over all groups and processes,
    in launch order, and finishes it when every member has begun it. Under these assumptions, all collectives end if and
    only if the orders of all devices are consistent. NCCL guarantees no more than this, but a GPU may do better: the
    result is a hazard, not a certain hang.
    """
    launches = {file.name: file.read_text().splitlines() for file in sorted(pathlib.Path(directory).iterdir())}
    devices: dict[str, list[str]] = {}
    for device, lines in launches.items():
        for line in lines:
            devices.setdefault(line, []).append(device)
    waiting = {device: collections.deque(lines) for device, lines in launches.items()}
    may_run = set(launches)
    while may_run:
        queue = waiting[may_run.pop()]
        while queue and all(waiting[device][0] == queue[0] for device in devices[queue[0]]):
            done = devices[queue[0]]
            for device in done:
                waiting[device].popleft()
            may_run.update(done)
    blocked = {device: queue[0] for device, queue in waiting.items() if queue}
    # Each device in the chain waits for a collective that is not yet first in the queue of the next device.
    chain = list(itertools.islice(blocked, 1))
    while chain and chain[-1] not in chain[:-1]:
        first = blocked[chain[-1]]
        chain.append(next(device for device in devices[first] if blocked[device] != first))
    cycle = chain[chain.index(chain[-1]) :] if chain else []
    names = _name_launches(launches.values(), [blocked[device] for device in cycle])
    return "; ".join(
        f"device {there} launches {names[blocked[there]]} before {names[blocked[here]]}"
        for here, there in itertools.pairwise(cycle)
    )


def _name_launches(launches: Iterable[list[str]], chosen: list[str]) -> dict[str, str]:
    """Names launches in a way that is the same in every run.

    Each group is named by a letter, and the launches of a group are counted from the first launch.
    """
    first: dict[str, int] = {}
    for group, number, _ in map(str.split, itertools.chain.from_iterable(launches)):
        first[group] = min(first.get(group, int(number)), int(number))
    groups = list(dict.fromkeys(line.split()[0] for line in chosen))
    return {
        line: f"{kind} {int(number) - first[group] + 1} of group {chr(ord('A') + groups.index(group))}"
        for line, (group, number, kind) in ((line, line.split()) for line in chosen)
    }
