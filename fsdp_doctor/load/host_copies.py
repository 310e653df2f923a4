"""Copies portions to where they belong: threads read them out of pageable memory and files.

What goes to the device from there passes through pinned chunks, so that the link is not held up by the reading. What
is pinned, or on the device, is copied by the device alone. A chunk is one job of a thread, however many tensors share
it: the handing over costs the host more than the tensors of most layers take to be read.
"""

from __future__ import annotations

import collections
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_doctor.extract.streams import Streams
from fsdp_doctor.load.portions import Portion

_CHUNK_BYTES = 16 << 20
# Where each piece begins in a chunk: as the device likes it.
_ALIGNMENT = 512
_MOST_THREADS = 16
# Beside those that threads are reading into.
_CHUNKS_ON_THE_LINK = 4


@dataclass(eq=False)
class _Chunk:
    """Pinned memory. taken: the event after which the device has read it, None while it has nothing to read."""

    memory: torch.Tensor
    taken: Any = None


@dataclass(eq=False, slots=True)
class _Piece:
    """What is read of a portion from ``start`` on. place: in the chunk, where there is one."""

    portion: Portion
    start: int
    target: torch.Tensor
    place: int


@dataclass(eq=False)
class _Batch:
    """What one thread reads at once; from the chunk, where there is one, it is yet to be copied to the targets.

    nbytes: how much of a chunk it takes.
    """

    chunk: _Chunk | None
    pieces: list[_Piece] = field(default_factory=list)
    nbytes: int = 0
    job: Future[None] | None = None


class HostCopies:
    """Targets are 1-D bytes. What a copy reads must stay as it is until ``finish`` has returned."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._num_threads = threads_of_a_rank()
        self._pool: ThreadPoolExecutor | None = None
        self._free: collections.deque[_Chunk] = collections.deque()
        self._begun: _Batch | None = None
        self._reading: collections.deque[_Batch] = collections.deque()

    def close(self) -> None:
        """Waits for the threads and the device, whatever they end with: what they write to may be freed then."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._streams.loaded()

    def copy(self, portion: Portion, target: torch.Tensor, start: int = 0) -> None:
        """As many bytes as the target has, from ``start`` on."""
        memory = portion.memory
        if memory is not None and self._by_device(memory, target):
            self._streams.load(target, memory[start : start + target.numel()])
            return
        done = 0
        while done < target.numel():
            batch = self._batch(on_host=target.device.type == "cpu")
            some = target[done : done + _CHUNK_BYTES - batch.nbytes]
            batch.pieces.append(_Piece(portion, start + done, some, batch.nbytes))
            batch.nbytes += -(-some.numel() // _ALIGNMENT) * _ALIGNMENT
            done += some.numel()

    def flush(self) -> None:
        """What goes to the host has come there; what goes to the device is in the loading stream."""
        self._submit()
        while self._reading:
            self._take()

    def finish(self) -> None:
        """All has been read, and has come to where it belongs."""
        self.flush()
        self._streams.loaded()

    def _by_device(self, memory: torch.Tensor, target: torch.Tensor) -> bool:
        if memory.device.type != "cpu":
            return True
        return target.device.type != "cpu" and memory.is_pinned()

    def _batch(self, *, on_host: bool) -> _Batch:
        """One that has room."""
        begun = self._begun
        if begun is None or begun.nbytes >= _CHUNK_BYTES or (begun.chunk is None) != on_host:
            self._submit()
            begun = self._begun = _Batch(None if on_host else self._chunk())
        return begun

    def _submit(self) -> None:
        if (batch := self._begun) is None:
            return
        self._begun = None
        while len(self._reading) >= self._num_threads + _CHUNKS_ON_THE_LINK:
            self._take()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads)
        batch.job = self._pool.submit(_read, batch)
        self._reading.append(batch)

    def _chunk(self) -> _Chunk:
        if self._free:
            return self._free.popleft()
        return _Chunk(torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True))

    def _take(self) -> None:
        batch = self._reading.popleft()
        assert batch.job is not None
        batch.job.result()
        if (chunk := batch.chunk) is not None:
            for piece in batch.pieces:
                self._streams.load(piece.target, chunk.memory[piece.place : piece.place + piece.target.numel()])
            chunk.taken = self._streams.loading_event()
            self._free.append(chunk)


def threads_of_a_rank() -> int:
    """As many as there are processors for each of the host's ranks, within limits."""
    processors = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(2, min(_MOST_THREADS, processors))


def _read(batch: _Batch) -> None:
    chunk = batch.chunk
    if chunk is not None and chunk.taken is not None:
        chunk.taken.synchronize()
    for piece in batch.pieces:
        into = piece.target if chunk is None else chunk.memory[piece.place : piece.place + piece.target.numel()]
        piece.portion.fill(into, piece.start)
