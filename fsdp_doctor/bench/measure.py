"""The clock and the memory counter: what one path takes, over all ranks."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# What takes longer than this is not repeated as often as asked for.
_ENOUGH_SECONDS = 6.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """seconds: the median of ``times``. first_seconds: of the first call of all. error: why there are none."""

    seconds: float = 0.0
    first_seconds: float = 0.0
    times: tuple[float, ...] = ()
    peak_extra_bytes: int | None = None
    error: str = ""


class Clock:
    """device: this rank's. Every rank must measure the same things in the same order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device.type) if device.type != "cpu" else None
        # What all ranks agree over must not be the link that is measured.
        self._control: Any = dist.new_group(backend="gloo")

    def seconds(self, run: Callable[[], object]) -> float:
        """From the moment when all ranks are ready to the moment when the last is done, its device included."""
        self._synchronize()
        dist.barrier(group=self._control)
        start = time.perf_counter()
        run()
        self._synchronize()
        return self.highest(time.perf_counter() - start)

    def peak_bytes(self, run: Callable[[], object]) -> int | None:
        """Device memory in tensors during it, beyond what there was before; the rank with the most."""
        if self._module is None:
            run()
            return None
        self._synchronize()
        self._module.reset_peak_memory_stats()
        before = self._module.memory_allocated()
        run()
        self._synchronize()
        return int(self.highest(self._module.max_memory_allocated() - before))

    def highest(self, value: float) -> float:
        """Over all ranks."""
        number = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._control)
        return float(number.item())

    def _synchronize(self) -> None:
        if self._module is not None:
            self._module.synchronize()

    def timing(self, once: Callable[[], object], restore: Callable[[], object], repeat: int) -> Timing:
        """The first run, one whose memory is taken, then those that are timed."""
        self._synchronize()
        dist.barrier(group=self._control)
        start = time.perf_counter()
        error = _failure(once)
        self._synchronize()
        first = self.highest(time.perf_counter() - start)
        if self.highest(bool(error)):
            return Timing(error=error or "another rank raised")
        restore()
        gc.collect()
        peak = self.peak_bytes(once)
        restore()
        times: list[float] = []
        while len(times) < repeat and sum(times) < _ENOUGH_SECONDS:
            times.append(self.seconds(once))
            restore()
        return Timing(seconds=statistics.median(times), first_seconds=first, times=tuple(times), peak_extra_bytes=peak)


def _failure(once: Callable[[], object]) -> str:
    """Why it cannot be measured; empty where it can."""
    try:
        once()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
