"""Copies portions of tensors to where they belong: threads read them out of pageable memory and files.

What goes to the device from there passes through pinned chunks, so that the link is not held up by the reading. What
is pinned, or on the device, is copied by the device alone. A chunk is one job of a thread, however many tensors share
it: the handing over costs the host more than the tensors of most layers take to be read. Without pinned memory the
chunks are not pinned, and without threads nothing is read ahead.
"""

from __future__ import annotations

import collections
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_doctor.extract.streams import Streams

# Where each piece begins in a chunk: as the device likes it.
_ALIGNMENT = 512
# Beside those that threads are reading into.
_CHUNKS_ON_THE_LINK = 4


class Portion(ABC):
    """A part of a tensor, in bytes. nbytes: how long it is. memory: its bytes, 1-D, where they are in memory."""

    nbytes: int
    memory: torch.Tensor | None = None

    @abstractmethod
    def fill(self, target: torch.Tensor, start: int) -> None:
        """Its bytes from ``start`` on into a target in host memory, 1-D. Any thread may call it."""


class InMemory(Portion):
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory: torch.Tensor = memory
        self.nbytes = memory.numel()

    def fill(self, target: torch.Tensor, start: int) -> None:
        target.copy_(self.memory[start : start + target.numel()])


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
    """Targets are 1-D bytes. What a copy reads must stay as it is until ``finish`` has returned.

    most_threads: of this rank. chunk_bytes: pinned memory is one for each of them, and five.
    """

    def __init__(self, streams: Streams, most_threads: int = 16, chunk_bytes: int = 16 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._streams = streams
        self._num_threads = threads_of_a_rank(most_threads)
        self._readers: _Readers | None = None
        self._num_submitted = self._num_taken = 0
        self._free: collections.deque[_Chunk] = collections.deque()
        self._begun: _Batch | None = None
        self._reading: collections.deque[_Batch] = collections.deque()

    def close(self) -> None:
        """Waits for the threads and the device, whatever they end with: what they write to may be freed then."""
        if self._readers is not None:
            self._readers.close()
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
            some = target[done : done + self._chunk_bytes - batch.nbytes]
            batch.pieces.append(_Piece(portion, start + done, some, batch.nbytes))
            batch.nbytes += -(-some.numel() // _ALIGNMENT) * _ALIGNMENT
            done += some.numel()

    def submit(self) -> int:
        """What is to be copied is being read; the number is for ``flush``."""
        self._submit()
        return self._num_submitted

    def flush(self, submitted: int | None = None) -> None:
        """What goes to the host has come there; what goes to the device is in the loading stream.

        submitted: only what had been when ``submit`` returned this.
        """
        last = self.submit() if submitted is None else submitted
        while self._num_taken < last:
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
        if begun is None or begun.nbytes >= self._chunk_bytes or (begun.chunk is None) != on_host:
            self._submit()
            begun = self._begun = _Batch(None if on_host else self._chunk())
        return begun

    def _submit(self) -> None:
        if (batch := self._begun) is None:
            return
        self._begun = None
        while len(self._reading) >= self._num_threads + _CHUNKS_ON_THE_LINK:
            self._take()
        if self._readers is None:
            self._readers = _Readers(self._num_threads)
        batch.job = self._readers.submit(batch)
        self._reading.append(batch)
        self._num_submitted += 1

    def _chunk(self) -> _Chunk:
        if self._free:
            return self._free.popleft()
        try:
            return _Chunk(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=True))
        except RuntimeError:
            # There is no more of it, so that a chunk which is on its way has to do.
            while self._reading and not self._free:
                self._take()
            return self._free.popleft() if self._free else _Chunk(torch.empty(self._chunk_bytes, dtype=torch.uint8))

    def _take(self) -> None:
        batch = self._reading.popleft()
        self._num_taken += 1
        assert batch.job is not None
        batch.job.result()
        if (chunk := batch.chunk) is not None:
            for piece in batch.pieces:
                self._streams.load(piece.target, chunk.memory[piece.place : piece.place + piece.target.numel()])
            chunk.taken = self._streams.loading_event()
            self._free.append(chunk)


class _Readers:
    """As many threads as are to be had, up to ``most``. Without any, what is submitted is read at once."""

    def __init__(self, most: int) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for _ in range(most):
            thread = threading.Thread(target=self._run, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)

    def submit(self, batch: _Batch) -> Future[None]:
        job: Future[None] = Future()

        def read() -> None:
            try:
                _read(batch)
                job.set_result(None)
            except BaseException as error:
                job.set_exception(error)

        if self._threads:
            self._waiting.put(read)
        else:
            read()
        return job

    def close(self) -> None:
        """Waits for what is being read; what nobody has begun to read is not read."""
        while not self._waiting.empty():
            self._waiting.get()
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (read := self._waiting.get()) is not None:
            read()
            # While it waits it must not hold the targets of what it has read.
            del read


def threads_of_a_rank(most: int = 16) -> int:
    """As many as there are processors for each of the host's ranks, within limits."""
    processors = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(2, min(most, processors))


def _read(batch: _Batch) -> None:
    chunk = batch.chunk
    if chunk is not None and chunk.taken is not None:
        chunk.taken.synchronize()
    for piece in batch.pieces:
        into = piece.target if chunk is None else chunk.memory[piece.place : piece.place + piece.target.numel()]
        piece.portion.fill(into, piece.start)
