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
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from fsdp_doctor.emulated import shared_memory
from fsdp_doctor.emulated.library import _C

_NAME = "emulated"
_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)
_Device = torch.device | str | int | None
_MIB = 2**20

# The functions of torch.cuda that are the library's as they are.
init = _lazy_init = _C.initialize  # as the first use does; RuntimeError in a fork of a process that has used the device
is_initialized = _C.is_initialized
_is_in_bad_fork = _C.is_in_bad_fork
device_count = _C.device_count
current_device = _C.current_device
_exchange_device = _maybe_exchange_device = _C.exchange_device
empty_cache = _C.empty_cache
# And those of the emulated device alone.
pinned_memory_allocated = _C.pinned_bytes  # of tensors, in bytes
late_completion = _C.is_late
copies_in_flight = _C.copies_in_flight  # non-blocking copies of this process that have not happened yet


def __getattr__(name: str) -> Any:
    # torch.utils.checkpoint reads this name, and keeps the device's random state only if it is true.
    if name == "_initialized":
        return is_initialized()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_available() -> bool:
    """True: the device is host memory."""
    return True


def set_device(device: _Device) -> None:
    """Make ``device`` the current one of this thread."""
    _C.exchange_device(_find_index(device))


class device:  # noqa: N801, torch.cuda's name
    """Context in which ``device`` is the current device; None changes nothing."""

    def __init__(self, device: _Device) -> None:
        self.idx = -1 if device is None else _find_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _exchange_device(self.prev_idx)


class device_of(device):  # noqa: N801, torch.cuda's name
    """Context in which the device of ``tensor`` is current; a tensor of another kind of device changes nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.get_device() if tensor.device.type == _NAME else None)


def get_device_name(device: _Device = None) -> str:
    """A name for reports."""
    return "emulated accelerator in host memory"


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """The properties that ``torch.cuda.get_device_properties`` has, under the same names; memory in bytes."""

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
    """The properties of ``device``. Raises AssertionError, as CUDA does, if there is no such device."""
    index = _find_index(device)
    if not 0 <= index < device_count():
        raise AssertionError("Invalid device id")
    major, minor = get_device_capability(index)
    return DeviceProperties(get_device_name(index), mem_get_info(index)[1], major, minor, os.cpu_count() or 1)


def get_device_capability(device: _Device = None) -> tuple[int, int]:
    """(9, 0) as on an H100, so that callers find that bfloat16 is supported."""
    return 9, 0


def can_device_access_peer(device: _Device, peer_device: _Device) -> bool:
    """False: no device reads the memory of another."""
    return False


def get_arch_list() -> list[str]:
    """Empty: nothing is compiled for the device."""
    return []


def _find_index(device: _Device) -> int:
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
        return super().__new__(cls, torch.device(_NAME, _find_index(device)), priority=priority)


class Event(torch.Event):
    """An event on a stream of an emulated device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        event = super().__new__(cls, _NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)
        event._timed = enable_timing
        return event

    _timed: bool

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Milliseconds between the two records, on the host's clock."""
        if not (self._timed and getattr(end_event, "_timed", True)):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        milliseconds: float = _C.milliseconds_between(self.event_id, end_event.event_id)
        return milliseconds


def current_stream(device: _Device = None) -> torch.Stream:
    """The stream that kernels of this thread are issued on."""
    return torch.accelerator.current_stream(_find_index(device))


def default_stream(device: _Device = None) -> torch.Stream:
    """The stream that is current in a thread that has set no other."""
    return Stream(stream_id=0, device_index=_find_index(device), device_type=_TYPE)


def set_stream(stream: torch.Stream | None) -> None:
    """Make ``stream`` and its device the current ones; None changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Context in which kernels are issued on ``stream``; None changes nothing."""

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
    """A context in which kernels are issued on ``stream``; None changes nothing."""
    return StreamContext(stream)


def is_current_stream_capturing() -> bool:
    """False: graphs are not emulated."""
    return False


def _sleep(cycles: int) -> None:
    """Issue a kernel that takes ``cycles`` nanoseconds on the current stream."""
    _C.sleep(cycles / 1e9)


def synchronize(device: _Device = None) -> None:
    """Wait for all streams of ``device``, including the copies in flight."""
    _C.synchronize_device(_find_index(device))


# Random numbers


def _find_generator(device: _Device) -> torch.Generator:
    generator: torch.Generator = _C.default_generator(_find_index(device))
    return generator


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _find_generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        _find_generator(index).manual_seed(seed)


def seed() -> int:
    """Seed the current device's generator from the system's randomness, and return the seed."""
    return _find_generator(None).seed()


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return _find_generator(None).initial_seed()


def get_rng_state(device: _Device = _NAME) -> torch.Tensor:
    """The generator's seed and offset: a CPU tensor of 16 bytes, as CUDA's."""
    return _find_generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: _Device = _NAME) -> None:
    """Restore a state that ``get_rng_state`` returned."""
    _find_generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The generator's state of each device."""
    return [get_rng_state(index) for index in range(device_count())]


seed_all = seed


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Restore the states that ``get_rng_state_all`` returned."""
    for index, state in enumerate(states):
        set_rng_state(state, index)


# Autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that autocast may compute in."""
    return [torch.bfloat16, torch.float16, torch.float32]


def is_tf32_supported() -> bool:
    """False: the CPU has no TF32."""
    return False


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: the CPU computes in bfloat16."""
    return True


# Memory, in bytes


def _read_stats(device: _Device) -> dict[str, int]:
    stats: dict[str, int] = _C.memory_stats(_find_index(device))
    return stats


def memory_allocated(device: _Device = None) -> int:
    """Bytes that tensors of the device take now, each rounded up to a multiple of 512 as CUDA's allocator does."""
    return _read_stats(device)["allocated"]


def max_memory_allocated(device: _Device = None) -> int:
    """The maximum of ``memory_allocated`` since the last reset."""
    return _read_stats(device)["peak"]


def memory_reserved(device: _Device = None) -> int:
    """Bytes in the caching allocator's segments; equal to ``memory_allocated`` without ``use_caching_allocator``."""
    return _read_stats(device)["reserved"]


def max_memory_reserved(device: _Device = None) -> int:
    """The maximum of ``memory_reserved`` since the last reset."""
    return _read_stats(device)["reserved_peak"]


memory_cached = memory_reserved
max_memory_cached = max_memory_reserved


def memory_stats(device: _Device = None) -> dict[str, int]:
    """The counters of ``torch.cuda.memory_stats`` that are emulated, under the same names."""
    stats = _read_stats(device)
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
    """``memory_stats`` as nested dictionaries, one level for each part of a name."""
    nested: dict[str, Any] = {}
    for name, value in memory_stats(device).items():
        *groups, last = name.split(".")
        at = nested
        for group in groups:
            at = at.setdefault(group, {})
        at[last] = value
    return nested


def memory_summary(device: _Device = None, abbreviated: bool = False) -> str:
    """``memory_stats`` as text: one line for each counter, bytes in MiB."""
    lines = [f"memory of emulated:{_find_index(device)}"]
    for name, value in memory_stats(device).items():
        lines.append(f"{name:<36} {f'{value / _MIB:.1f} MiB' if 'bytes' in name else value:>14}")
    return "\n".join(lines)


def host_memory_stats() -> dict[str, int]:
    """Bytes of pinned host memory that CUDA's allocator would have taken, under the name of ``torch.cuda``: a power of
    two for each tensor, kept for the next one when it is freed.
    """
    return {"allocated_bytes.current": _C.pinned_reserved()}


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Set the peaks to what is allocated and reserved now."""
    _C.reset_peak(_find_index(device))


reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: _Device = None) -> None:
    """Set the numbers of allocations, retries and out-of-memory errors to zero."""
    _C.reset_accumulated(_find_index(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Bytes (free, total) of ``device``; the total is the host's memory if no limit is set."""
    free, total = _C.memory_info(_find_index(device))
    return int(free), int(total)


def set_memory_limit(nbytes: int | None) -> None:
    """Raise ``torch.OutOfMemoryError`` for allocations beyond ``nbytes`` on one device; None removes the limit."""
    _C.set_memory_limit(nbytes or 0)


def share_devices(path: str | os.PathLike[str]) -> None:
    """Share the devices' memory with all processes of this host that pass the same ``path``.

    ``mem_get_info`` and the memory limit then count the allocations of all of them. The file is created if it does not
    exist. Raises RuntimeError if called twice, ValueError if the file cannot be used.
    """
    _C.share_devices(os.fspath(path))


def set_per_process_memory_fraction(fraction: float, device: _Device = None) -> None:
    """Limit each device to this fraction of its memory. Raises ValueError outside 0 to 1."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    limit = _read_stats(device)["limit"]
    if limit:
        _C.set_memory_limit(0)
    _C.set_memory_limit(int(fraction * mem_get_info(device)[1]))


def get_per_process_memory_fraction(device: _Device = None) -> float:
    """The limit as a fraction of the host's memory; 1 without a limit."""
    limit = _read_stats(device)["limit"]
    return limit / int(_C.host_bytes()) if limit else 1.0


def get_allocator_backend() -> str:
    """``native``: the name of the CUDA allocator that is emulated."""
    return "native"


# How strict the devices are


def set_late_completion(late: bool) -> None:
    """Let non-blocking copies finish as late as their contract allows (the default), or immediately."""
    _C.set_late(late)


def use_caching_allocator(use: bool = True) -> None:
    """Reserve memory in segments that are split and cached by stream, as CUDA's caching allocator does; off by default.

    ``memory_reserved`` and ``inactive_split_bytes`` are counted then, and a limit is one of reserved memory. Raises
    RuntimeError while there are tensors on a device.
    """
    _C.set_caching(use)


def poison_freed_memory(poison: bool = True) -> None:
    """Fill memory with NaNs when it is freed; off by default.

    A copy to the host that is in flight then delivers NaNs, unless it is on the stream that the memory was allocated
    on, that stream waits for it, or ``record_stream`` was called: on a GPU the memory could be in other use.
    """
    _C.set_poisoning(poison)


@contextlib.contextmanager
def race_detection() -> Iterator[None]:
    """Context that raises RuntimeError at its end, with a line for each data race of all threads of the process.

    A race is two accesses of the same bytes, one of them a write, on streams that nothing orders; or memory that may
    be allocated again while another stream still uses it without ``record_stream``.
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
    """The races that ``race_detection`` has found since the last call, one sentence each."""
    races: list[str] = _C.take_races()
    return races


# Collectives


def make_backend(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> dist.Backend:
    """Makes a group of ``size`` processes over ``store``, the default group or not. Every rank of it must call it."""
    store = dist.PrefixStore("emulated", store)
    host = dist.ProcessGroupGloo(store, rank, size, timeout)
    file = shared_memory.open_for_group(store, rank, size, _C.shared_bytes(size))
    if rank == 0:
        store.set("name", secrets.token_hex(3))
    backend: dist.Backend = _C.make_backend(host, file, store.get("name").decode(), timeout, make_backend)
    return backend


@contextlib.contextmanager
def note_launch_order(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Context in which the collectives of this process are noted in ``directory``, for :func:`find_order_cycle`.

    Processes that are given the same directory, and use the same device, are noted in the order of their launches.
    Raises OSError where the directory cannot be made.
    """
    os.makedirs(directory, exist_ok=True)
    _C.log_launches(os.fspath(directory))
    try:
        yield
    finally:
        _C.log_launches("")


def find_order_cycle(directory: str | os.PathLike[str]) -> str:
    """Says in which orders two or more devices launch collectives that wait for one another; empty if none do.

    It is exact for a model: a device runs one collective at a time, over all groups and processes, in the order of
    their launch, and is through with it when every member has begun it. Then all end if and only if the orders of all
    devices fit together, so nothing has to be waited for. NCCL promises no more than that, and a GPU may do better:
    what is found is a hazard, not a certainty.
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
    # What a device waits for is behind what the next one waits for.
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
    """What a line says of a launch, the same in every run: groups are letters, counted from their first launches."""
    first: dict[str, int] = {}
    for group, number, _ in map(str.split, itertools.chain.from_iterable(launches)):
        first[group] = min(first.get(group, int(number)), int(number))
    groups = list(dict.fromkeys(line.split()[0] for line in chosen))
    return {
        line: f"{kind} {int(number) - first[group] + 1} of group {chr(ord('A') + groups.index(group))}"
        for line, (group, number, kind) in ((line, line.split()) for line in chosen)
    }
