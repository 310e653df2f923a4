"""Copies portions of tensors. Portions in pageable memory and in files are read by threads.

Copies to the device go through pinned chunks, so that the link does not wait for reads. A thread has two chunks, and
sends one chunk while it reads into the other. Portions in pinned or device memory are copied by the device itself. A
thread's job is one chunk, however many tensors share it, because handing over a job costs the host more than reading
the tensors of most layers. All reads are planned before the first read begins, because Python code in one thread slows
the reads of other threads. If memory cannot be pinned, the chunks are pageable; if no thread can be started, the
caller's thread reads.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.transport.streams import Streams

# Where each piece begins in a chunk: as the device likes it.
_ALIGNMENT = 512
_CHUNKS_OF_A_THREAD = 2


class Portion(ABC):
    """Part of a tensor, in bytes.

    nbytes: the length of the part.
    extra_bytes: the size of memory that was allocated only for this part.
    memory: the bytes of the part, 1-D, if they are in memory; otherwise None.
    """

    nbytes: int
    extra_bytes: int = 0
    memory: torch.Tensor | None = None

    @abstractmethod
    def fill(self, target: torch.Tensor, start: int) -> None:
        """Copies bytes, beginning with number ``start``, into a 1-D target in host memory. Any thread may call it."""


class InMemory(Portion):
    def __init__(self, memory: torch.Tensor, extra_bytes: int = 0) -> None:
        self.memory: torch.Tensor = memory
        self.nbytes, self.extra_bytes = memory.numel(), extra_bytes

    def fill(self, target: torch.Tensor, start: int) -> None:
        target.copy_(self.memory[start : start + target.numel()])


@dataclass(eq=False, slots=True)
class _Piece:
    """Piece of a portion, from ``start`` on.

    place: the position of the piece in the chunk, if it goes through a chunk.
    """

    portion: Portion
    start: int
    target: torch.Tensor
    place: int


@dataclass(eq=False, slots=True)
class _Batch:
    """One job of a copying thread: copies pieces to the host, or to the device by way of a pinned chunk.

    nbytes: the number of bytes that the job uses of the chunk.
    """

    on_host: bool
    pieces: list[_Piece] = field(default_factory=list)
    nbytes: int = 0


class _Submission:
    """Batches that are read together."""

    def __init__(self, batches: Sequence[_Batch]) -> None:
        self._batches = collections.deque(batches)
        self._count = len(batches)
        self._done: list[None] = []
        self._error: BaseException | None = None
        self._over = threading.Event()

    def read_one(self, read: Callable[[_Batch], None]) -> None:
        """Reads one batch. Any thread may call it, as often as there are batches.

        No reference to the batch is left when it counts as read, since the batch keeps the memory of a bucket alive.
        """
        try:
            read(self._batches.popleft())
        except BaseException as error:
            self.note_failure(error)
        else:
            self.note_done()

    def note_done(self) -> None:
        self._done.append(None)
        if len(self._done) == self._count:
            self._over.set()

    def note_failure(self, error: BaseException) -> None:
        self._error = error
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error


class HostCopies:
    """Copies portions of tensors into targets of 1-D bytes. The sources must not change until ``finish`` has returned.

    most_threads: the largest number of threads of this rank.
    chunk_bytes: the size of a pinned buffer; each thread has two.
    """

    def __init__(self, streams: Streams, most_threads: int = 16, chunk_bytes: int = 8 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._streams = streams
        self._num_threads = count_threads(most_threads)
        self._readers: _Readers | None = None
        self._begun: list[_Batch] = []
        self._num_submitted = 0
        self._submissions: collections.deque[_Submission] = collections.deque()

    def close(self) -> None:
        """Waits for the threads and the device, even after errors, so that the memory to which they write may be freed.

        Reads that no thread has begun are dropped. More may be copied afterwards.
        """
        if self._readers is not None:
            self._readers.close()
        self._readers = None
        self._begun.clear()
        self._submissions.clear()
        self._streams.wait_until_loaded()

    def copy(self, portion: Portion, target: torch.Tensor, start: int = 0) -> None:
        """Begins to copy bytes of the portion, from ``start`` on, until the target is full."""
        memory = portion.memory
        if memory is not None and _is_copied_by_device(memory, target):
            self._streams.load(target, memory[start : start + target.numel()])
            return
        done, nbytes, on_host = 0, target.numel(), target.device.type == "cpu"
        while done < nbytes:
            batch = self._begun[-1] if self._begun else None
            if batch is None or batch.nbytes >= self._chunk_bytes or batch.on_host != on_host:
                batch = _Batch(on_host)
                self._begun.append(batch)
            length = min(nbytes - done, self._chunk_bytes - batch.nbytes)
            batch.pieces.append(_Piece(portion, start + done, target[done : done + length], batch.nbytes))
            batch.nbytes += -(-length // _ALIGNMENT) * _ALIGNMENT
            done += length

    def submit(self) -> int:
        """Begins to read everything that was given to ``copy``. Returns a number for ``flush``."""
        if self._begun:
            if self._readers is None:
                self._readers = _Readers(self._streams, self._num_threads, self._chunk_bytes)
            self._submissions.append(self._readers.submit(self._begun))
            self._num_submitted += 1
            self._begun = []
        return self._num_submitted

    def flush(self, submitted: int | None = None) -> None:
        """Returns when copies to the host are done, and copies to the device were launched on the loading stream.

        submitted: a result of ``submit``; only copies that were submitted by then are waited for.
        """
        last = self.submit() if submitted is None else submitted
        while self._num_submitted - len(self._submissions) < last:
            self._submissions.popleft().wait()
        self._streams.wait_for_threads()

    def finish(self) -> None:
        """Finishes all copies, and returns when they are done."""
        self.flush()
        self._streams.wait_until_loaded()


def _is_copied_by_device(memory: torch.Tensor, target: torch.Tensor) -> bool:
    if memory.device.type != "cpu":
        return True
    return target.device.type != "cpu" and memory.is_pinned()


class _Readers:
    """Threads that read, at most ``most``. If the system allows no thread, the caller's thread reads."""

    def __init__(self, streams: Streams, most: int, chunk_bytes: int) -> None:
        self._streams, self._chunk_bytes = streams, chunk_bytes
        self._waiting: queue.SimpleQueue[_Submission | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for _ in range(most):
            thread = threading.Thread(target=self._run, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)

    def submit(self, batches: Sequence[_Batch]) -> _Submission:
        submission = _Submission(batches)
        for _ in batches:
            self._waiting.put(submission)
        if not self._threads:
            self._waiting.put(None)
            self._run()
        return submission

    def close(self) -> None:
        """Waits for running reads; reads that no thread has begun are dropped."""
        while not self._waiting.empty():
            self._waiting.get()
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        chunks = _Chunks(self._streams, self._chunk_bytes)
        with contextlib.ExitStack() as stack:
            is_ready = False

            def read(batch: _Batch) -> None:
                nonlocal is_ready
                # Here, because what this raises is somebody's error, too.
                if not is_ready:
                    stack.enter_context(self._streams.enter_thread())
                    is_ready = True
                _read(batch, chunks)

            while (submission := self._waiting.get()) is not None:
                submission.read_one(read)


class _Chunks:
    """Chunks of one thread, used in turns.

    With two chunks, the device may read one chunk while the thread reads into the other. With one chunk, the thread
    waits.
    """

    def __init__(self, streams: Streams, nbytes: int) -> None:
        self._streams, self._nbytes = streams, nbytes
        self._free: collections.deque[tuple[torch.Tensor, Any]] = collections.deque()
        self._most = _CHUNKS_OF_A_THREAD

    def take(self) -> torch.Tensor:
        """Returns a chunk that the device has finished reading."""
        if len(self._free) < self._most:
            try:
                return torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError:
                # There is no more of it.
                self._most = max(len(self._free), 1)
                if not self._free:
                    return torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")
        memory, taken = self._free.popleft()
        if taken is not None:
            taken.synchronize()
        return memory

    def give(self, memory: torch.Tensor) -> None:
        """Gives a chunk back after copies from it were put into the stream."""
        self._free.append((memory, self._streams.record_loading()))


def count_threads(most: int = 16) -> int:
    """Returns the host's number of processors divided by its number of ranks, but at least 2 and at most ``most``."""
    processors = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(2, min(most, processors))


def view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a 1-D view of a contiguous tensor's bytes."""
    return tensor.view(-1).view(torch.uint8)


def view_as_memory(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the host. The tensor must stay alive."""
    nbytes = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr()) if nbytes else b""
    return memoryview(memory).cast("B")


def _read(batch: _Batch, chunks: _Chunks) -> None:
    """Reads a batch and, if it is for the device, copies all of its pieces with one call."""
    if batch.on_host:
        for piece in batch.pieces:
            piece.portion.fill(piece.target, piece.start)
        return
    chunk = chunks.take()
    targets = [piece.target for piece in batch.pieces]
    parts = [chunk[piece.place : piece.place + piece.target.numel()] for piece in batch.pieces]
    for piece, part in zip(batch.pieces, parts, strict=True):
        piece.portion.fill(part, piece.start)
    private.copy_all(targets, parts, non_blocking=True)
    chunks.give(chunk)
