"""Writes of one rank: chunks of its shards, copied to the host if necessary, summed and written by threads."""

from __future__ import annotations

import collections
import math
import os
import pathlib
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import torch

from fsdp_doctor.checkpoints.sums import LinearCrc, continue_linear_crc, crc32, shift_crc
from fsdp_doctor.weights.extract.local import ShardPlace
from fsdp_doctor.weights.save.regions import FileRange, divide_into_chunks, list_blocks
from fsdp_doctor.weights.transport.host_copies import count_threads, view_as_bytes, view_as_memory

CHUNK_BYTES = 8 << 20
# More threads than files that are written at a time: while some write, others sum.
MOST_THREADS = 6


class Turn(NamedTuple):
    """The chunks that this rank writes of a tensor that several ranks hold.

    These are every ``num_ranks``-th chunk, beginning with ``first``; none if ``first`` is not below ``num_ranks``.
    """

    first: int
    num_ranks: int


class TensorInFile(NamedTuple):
    """Whole tensor in a file.

    number: the number of the file.
    begin: the offset of the tensor's first byte in the file.
    """

    name: str
    number: int
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# The chunks of one tensor: the target, the values, and their ranges of the file.
_Chunks: TypeAlias = Iterator[tuple[TensorInFile, torch.Tensor, list[FileRange]]]


class Writer:
    """Writer of this rank's shards into existing files.

    Host memory: one chunk for each thread and one more, pinned for shards on an accelerator.

    device: the device of the shards.
    sums: for each tensor, this rank's part of its CRC.
    """

    def __init__(self, paths: Sequence[pathlib.Path], device: torch.device) -> None:
        self._paths, self._device = paths, device
        self._fds: dict[int, int] = {}
        self._num_threads = count_threads(MOST_THREADS)
        self._pool = ThreadPoolExecutor(self._num_threads)
        # One item for each chunk that may be written at a time; its memory is allocated at its first use, if needed.
        self._free: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        for _ in range(self._num_threads + 1):
            self._free.put(None)
        self._begun: collections.deque[_Chunks] = collections.deque()
        self._running: collections.deque[Future[None]] = collections.deque()
        self._lock = threading.Lock()
        self.sums: dict[str, LinearCrc] = {}
        self.num_bytes = 0

    def write(self, target: TensorInFile, shard: torch.Tensor, place: ShardPlace, turn: Turn) -> None:
        """Begins to write this rank's part of a tensor. Raises the error of an earlier write.

        Chunks of several tensors take turns, because threads that write to one file wait for each other. The caller may
        drop its reference to the shard, but the values must not change until ``finish``.

        shard: the part, on any device and in any dtype.
        """
        self._begun.append(self._list_chunks(target, shard, place, turn))
        while len(self._begun) > self._num_threads:
            self._write_next()

    def _list_chunks(self, target: TensorInFile, shard: torch.Tensor, place: ShardPlace, turn: Turn) -> _Chunks:
        # Not all small tensors by the same rank.
        count, itemsize = crc32(target.name.encode()), target.dtype.itemsize
        for block, stretches in list_blocks(shard, target.shape, place):
            in_file = (stretch.convert_to_bytes(target.begin, itemsize) for stretch in stretches)
            first = 0
            for ranges in divide_into_chunks(in_file, CHUNK_BYTES):
                last = first + sum(nbytes for _, nbytes in ranges) // itemsize
                if count % turn.num_ranks == turn.first:
                    yield target, block[first:last].to(target.dtype), ranges
                first, count = last, count + 1

    def begin_all(self) -> None:
        """Begins to write all remaining chunks, and drops the shards except for the chunks that are being written."""
        while self._begun:
            self._write_next()

    def _write_next(self) -> None:
        """Begins to write one chunk of the next tensor in turn."""
        chunks = self._begun.popleft()
        if (found := next(chunks, None)) is None:
            return
        target, chunk, ranges = found
        while self._running and self._running[0].done():
            self._running.popleft().result()
        if target.number not in self._fds:
            self._fds[target.number] = os.open(self._paths[target.number], os.O_WRONLY | os.O_CLOEXEC)
        self.num_bytes += chunk.numel() * chunk.element_size()
        staging, copied = self._free.get(), None
        if chunk.device.type != "cpu":
            if staging is None:
                staging = _allocate_pinned(CHUNK_BYTES)
            on_host = staging[: chunk.numel() * chunk.element_size()].view(chunk.dtype)
            on_host.copy_(chunk, non_blocking=True)
            copied = torch.get_device_module(chunk.device.type).current_stream(chunk.device).record_event()
            chunk = on_host
        self._running.append(self._pool.submit(self._write_chunk, target, chunk, ranges, staging, copied))
        self._begun.append(chunks)

    def _write_chunk(
        self,
        target: TensorInFile,
        chunk: torch.Tensor,
        ranges: list[FileRange],
        staging: torch.Tensor | None,
        copied: Any,
    ) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            memory = view_as_memory(view_as_bytes(chunk))
            fd, crc, behind = self._fds[target.number], 0, ranges[0].offset
            for offset, nbytes in ranges:
                crc = continue_linear_crc(memory[:nbytes], shift_crc(crc, offset - behind))
                _write_all(fd, memory[:nbytes], offset)
                memory, behind = memory[nbytes:], offset + nbytes
            crc = shift_crc(crc, target.begin + target.nbytes - behind)
            with self._lock:
                self.sums[target.name] = self.sums.get(target.name, 0) ^ crc
        finally:
            self._free.put(staging)

    def finish(self) -> None:
        """Finishes all writes, and returns when they are on the disk."""
        self.begin_all()
        while self._running:
            self._running.popleft().result()
        list(self._pool.map(os.fsync, self._fds.values()))
        while self._fds:
            # A file system over a network may say only now that there is no room.
            os.close(self._fds.popitem()[1])

    def close(self) -> None:
        """Stops after an error: no further chunk is written."""
        self._pool.shutdown(cancel_futures=True)
        while self._fds:
            os.close(self._fds.popitem()[1])


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _allocate_pinned(nbytes: int) -> torch.Tensor:
    """Allocates pinned host memory; pageable memory if no more can be pinned."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
