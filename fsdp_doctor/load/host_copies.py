"""Copies portions to where they belong: threads read them out of pageable memory and files.

What goes to the device from there passes through pinned chunks, so that the link is not held up by the reading; the
thread that has read a chunk sends it on. What is pinned, or on the device, is copied by the device alone.
"""

from __future__ import annotations

import collections
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_doctor.extract.streams import Streams
from fsdp_doctor.load.portions import Portion

_CHUNK_BYTES = 8 << 20
# What is smaller is not worth a thread.
_SMALL_BYTES = 64 << 10
_MOST_THREADS = 16


@dataclass(eq=False)
class _Chunk:
    """Pinned memory. taken: the event after which the device has read it, None while it has nothing to read."""

    memory: torch.Tensor
    taken: Any = None


class HostCopies:
    """Targets are 1-D bytes. What a copy reads must stay as it is until ``finish`` has returned."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._num_threads = threads_of_a_rank()
        self._pool: ThreadPoolExecutor | None = None
        self._making = threading.Lock()
        self._num_chunks = 0
        self._free: collections.deque[_Chunk] = collections.deque()
        self._jobs: collections.deque[Future[None]] = collections.deque()

    def close(self) -> None:
        """Waits for the threads and the device, whatever they end with: what they write to may be freed then."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._streams.loaded()

    def copy(self, portion: Portion, target: torch.Tensor, start: int = 0) -> None:
        """As many bytes as the target has, from ``start`` on."""
        nbytes = target.numel()
        memory = portion.memory
        if nbytes <= _SMALL_BYTES and memory is None:
            memory = torch.empty(nbytes, dtype=torch.uint8)
            portion.fill(memory, start)
            start = 0
        if memory is not None and (nbytes <= _SMALL_BYTES or self._by_device(memory, target)):
            self._streams.load(target, memory[start : start + nbytes])
            return
        for begin in range(0, nbytes, _CHUNK_BYTES):
            self._fill(portion, target[begin : begin + _CHUNK_BYTES], start + begin)

    def flush(self) -> None:
        """What goes to the host has come there; what goes to the device is in the loading stream."""
        while self._jobs:
            self._jobs.popleft().result()

    def finish(self) -> None:
        """All has been read, and has come to where it belongs."""
        self.flush()
        self._streams.loaded()

    def _by_device(self, memory: torch.Tensor, target: torch.Tensor) -> bool:
        if memory.device.type != "cpu":
            return True
        return target.device.type != "cpu" and memory.is_pinned()

    def _fill(self, portion: Portion, target: torch.Tensor, start: int) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads)
        while len(self._jobs) >= 4 * self._num_threads:
            self._jobs.popleft().result()
        self._jobs.append(self._pool.submit(self._read, portion, target, start))

    def _read(self, portion: Portion, target: torch.Tensor, start: int) -> None:
        """On a thread of the pool, of which there are half as many as chunks: one is being read, one is being sent."""
        if target.device.type == "cpu":
            portion.fill(target, start)
            return
        chunk = self._chunk()
        try:
            memory = chunk.memory[: target.numel()]
            portion.fill(memory, start)
            self._streams.load(target, memory)
            chunk.taken = self._streams.loading_event()
        finally:
            self._free.append(chunk)

    def _chunk(self) -> _Chunk:
        """One that the device has read: the one that was sent longest ago, once all have been made."""
        with self._making:
            if self._num_chunks < 2 * self._num_threads:
                self._num_chunks += 1
                with self._streams.loading():
                    return _Chunk(torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True))
        chunk = self._free.popleft()
        if chunk.taken is not None:
            chunk.taken.synchronize()
        return chunk


def threads_of_a_rank() -> int:
    """As many as there are processors for each of the host's ranks, within limits."""
    processors = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(2, min(_MOST_THREADS, processors))
