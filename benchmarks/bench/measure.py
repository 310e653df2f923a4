"""Measures seconds, peak memory and the links' bandwidth over all ranks."""

from __future__ import annotations

import functools
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.transport.host_copies import count_threads

# A method that takes longer than this is repeated fewer times than the user asked for.
_ENOUGH_SECONDS = 6.0
_LINK_REPEAT = 5
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The timing of a method.

    seconds: the median of ``times``.
    first_seconds: the seconds of the very first call.
    error: the reason if there are no times; else empty.
    """

    seconds: float = 0.0
    first_seconds: float = 0.0
    times: tuple[float, ...] = ()
    peak_extra_bytes: int | None = None
    error: str = ""


class Clock:
    """A clock for all ranks. Every rank must measure the same calls in the same order.

    device: this rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device.type) if device.type != "cpu" else None
        # The ranks synchronize over a separate group, because they must not use the link that is measured.
        self._control: Any = dist.new_group(backend="gloo")

    def measure_seconds(self, run: Callable[[], object]) -> float:
        """Measures the seconds from when all ranks are ready until the last rank and its device have finished."""
        self._synchronize()
        dist.barrier(group=self._control)
        start = time.perf_counter()
        run()
        self._synchronize()
        return self.find_highest(time.perf_counter() - start)

    def measure_peak_bytes(self, run: Callable[[], object]) -> int | None:
        """Returns how far the memory of tensors on the device rises during ``run``: the highest of all ranks.

        On a CPU, returns None.
        """
        if self._module is None:
            run()
            return None
        self._synchronize()
        self._module.reset_peak_memory_stats()
        before = self._module.memory_allocated()
        run()
        self._synchronize()
        return int(self.find_highest(self._module.max_memory_allocated() - before))

    def find_highest(self, value: float) -> float:
        """Returns the highest value of all ranks."""
        number = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._control)
        return float(number.item())

    def time_runs(self, once: Callable[[], object], restore: Callable[[], object], repeat: int) -> Timing:
        """Times ``once``, and calls ``restore`` after each run.

        The first run is timed separately, a second run measures memory, and the further runs are timed.
        """
        self._synchronize()
        dist.barrier(group=self._control)
        start = time.perf_counter()
        error = ""
        try:
            once()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        self._synchronize()
        first = self.find_highest(time.perf_counter() - start)
        if self.find_highest(bool(error)):
            return Timing(error=error or "another rank raised")
        restore()
        gc.collect()
        peak = self.measure_peak_bytes(once)
        restore()
        times: list[float] = []
        while len(times) < repeat and sum(times) < _ENOUGH_SECONDS:
            times.append(self.measure_seconds(once))
            restore()
        return Timing(seconds=statistics.median(times), first_seconds=first, times=tuple(times), peak_extra_bytes=peak)

    def _synchronize(self) -> None:
        if self._module is not None:
            self._module.synchronize()


@dataclass(frozen=True, kw_only=True)
class Links:
    """The bandwidths of one rank in bytes per second, while all ranks do the same; None if there is no such link.

    all_gather: the bytes that a rank receives in an all-gather.
    host_copy: copies within the host's memory, by the threads of a load; measured only for loads.
    page_cache: reads from a file in the page cache, by the same threads; measured only for loads.
    """

    h2d_pinned: float | None = None
    h2d_pageable: float | None = None
    d2h_pinned: float | None = None
    d2h_pageable: float | None = None
    all_gather: float | None = None
    host_copy: float | None = None
    page_cache: float | None = None


def measure_links(clock: Clock, nbytes: int, direction: Direction) -> Links:
    """Measures the links. Every rank must call this function.

    nbytes: the size of each copy, and of the gathered tensor.
    """
    links = Links(all_gather=_measure_all_gather(clock, nbytes))
    if clock.device.type != "cpu":
        on_device = torch.empty(nbytes, dtype=torch.uint8, device=clock.device).random_()
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        pageable = torch.empty(nbytes, dtype=torch.uint8).fill_(1)
        links = replace(
            links,
            h2d_pinned=_measure_rate(clock, nbytes, lambda: on_device.copy_(pinned, non_blocking=True)),
            h2d_pageable=_measure_rate(clock, nbytes, lambda: on_device.copy_(pageable)),
            d2h_pinned=_measure_rate(clock, nbytes, lambda: pinned.copy_(on_device, non_blocking=True)),
            d2h_pageable=_measure_rate(clock, nbytes, lambda: pageable.copy_(on_device)),
        )
    if direction == "out":
        return links
    return replace(links, host_copy=_measure_host_copies(clock, nbytes), page_cache=_measure_page_cache(clock, nbytes))


def _measure_host_copies(clock: Clock, nbytes: int) -> float:
    source, target = (torch.empty(nbytes, dtype=torch.uint8).fill_(1) for _ in range(2))
    with ThreadPoolExecutor(count_threads()) as pool:
        parts = list(zip(target.split(_CHUNK_BYTES), source.split(_CHUNK_BYTES), strict=True))
        return _measure_rate(clock, nbytes, lambda: list(pool.map(lambda part: part[0].copy_(part[1]), parts)))


def _measure_page_cache(clock: Clock, nbytes: int) -> float:
    memory = bytearray(nbytes)
    with tempfile.TemporaryFile() as file, ThreadPoolExecutor(count_threads()) as pool:
        file.write(memory)
        file.flush()
        whole = memoryview(memory)
        offsets = range(0, nbytes, _CHUNK_BYTES)
        read = functools.partial(_read, file.fileno(), whole)
        return _measure_rate(clock, nbytes, lambda: list(pool.map(read, offsets)))


def _read(fd: int, whole: memoryview, offset: int) -> None:
    os.preadv(fd, [whole[offset : offset + _CHUNK_BYTES]], offset)


def _measure_all_gather(clock: Clock, nbytes: int) -> float | None:
    size = dist.get_world_size()
    if size == 1:
        return None
    sent = torch.empty(nbytes // size, dtype=torch.uint8, device=clock.device).random_()
    received = torch.empty(sent.numel() * size, dtype=torch.uint8, device=clock.device)
    group = dist.group.WORLD
    assert group is not None
    return _measure_rate(clock, sent.numel() * (size - 1), lambda: private.all_gather(group, [received], [sent]).wait())


def _measure_rate(clock: Clock, nbytes: int, move: Callable[[], object]) -> float:
    move()
    return nbytes / statistics.median(clock.measure_seconds(move) for _ in range(_LINK_REPEAT))
