"""Parts of full tensors, in bytes: read from memory or files, and written to this rank's shards."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_doctor.weights.fsdp.shards import LocalPart, Stretches
from fsdp_doctor.weights.load.layouts import Layout
from fsdp_doctor.weights.load.safetensors_files import SafetensorsFile
from fsdp_doctor.weights.load.source import Value
from fsdp_doctor.weights.load.targets import Target
from fsdp_doctor.weights.transport.host_copies import HostCopies, InMemory, Portion, view_as_bytes, view_as_memory
from fsdp_doctor.weights.transport.streams import Streams

_WEIGHTS = 1 << 17
# Limit for copies of parts that cannot be read in place.
_MOST_EXTRA_BYTES = 64 << 20
# Rows are read together in one call up to so many bytes, if the gaps between them are not longer than this.
_BLOCK_BYTES = 256 << 10
_LONGEST_GAP = 64 << 10


class InFile(Portion):
    """Part of a tensor in a file.

    stretches: the part's bytes in the file.
    """

    def __init__(self, file: SafetensorsFile, stretches: list[Stretches]) -> None:
        self._file, self._stretches = file, stretches
        self.nbytes = sum(stretch.length * stretch.rows for stretch in stretches)

    def fill(self, target: torch.Tensor, start: int) -> None:
        for stretch in self._stretches:
            length = stretch.length * stretch.rows
            if start < length:
                nbytes = min(length - start, target.numel())
                self._read(stretch, start, target[:nbytes])
                target, start = target[nbytes:], length
                if not target.numel():
                    break
            start -= length

    def _read(self, stretch: Stretches, start: int, target: torch.Tensor) -> None:
        memory, done = view_as_memory(target), 0
        while done < len(memory):
            row, within = divmod(start + done, stretch.length)
            offset = stretch.first + row * stretch.step + within
            rows = (
                min((len(memory) - done) // stretch.length, _BLOCK_BYTES // max(stretch.step, 1)) if not within else 0
            )
            if rows > 1 and stretch.step - stretch.length <= _LONGEST_GAP:
                # With one call, together with the gaps between the rows.
                block = torch.empty((rows - 1) * stretch.step + stretch.length, dtype=torch.uint8, device="cpu")
                self._file.read(offset, view_as_memory(block))
                nbytes = rows * stretch.length
                in_rows = block.as_strided((rows, stretch.length), (stretch.step, 1))
                target[done : done + nbytes].view(rows, -1).copy_(in_rows)
            else:
                nbytes = min(stretch.length - within, len(memory) - done)
                self._file.read(offset, memory[done : done + nbytes])
            done += nbytes


class Cast(Portion):
    """Part that is cast in pieces while it is read, so that there is never a second whole copy."""

    def __init__(self, source: Portion, dtype: torch.dtype, to: torch.dtype) -> None:
        self._source, self._dtype, self._to = source, dtype, to
        self.nbytes = source.nbytes // dtype.itemsize * to.itemsize
        self.extra_bytes = source.extra_bytes

    def fill(self, target: torch.Tensor, start: int) -> None:
        count, size = target.numel() // self._to.itemsize, self._dtype.itemsize
        values = _read_into_memory(self._source, start // self._to.itemsize * size, count * size)
        target.view(self._to).copy_(values.view(self._dtype))


def make_portion(value: Value, layout: Layout, part: LocalPart, dtype: torch.dtype) -> Portion:
    """Returns ``part`` of a full tensor as a portion to be read, in the order of the shard's elements and cast to
    ``dtype``.
    """
    if isinstance(value, torch.Tensor):
        return _make_portion_of_memory(value.detach(), layout, part, dtype)
    stretches = layout.list_stretches(value.shape, part)
    size = value.dtype.itemsize
    if stretches is None:
        whole = _read_into_memory(InFile(value.file, [Stretches(value.begin, value.shape.numel() * size, 0, 1)]))
        return _make_portion_of_memory(whole.view(value.dtype).view(value.shape), layout, part, dtype)
    in_file = InFile(value.file, [stretch.convert_to_bytes(value.begin, size) for stretch in stretches])
    return in_file if value.dtype == dtype else Cast(in_file, value.dtype, dtype)


def compute_checksum(source: Portion) -> int:
    """Computes a checksum of 64 bits; different bytes are very unlikely to have the same checksum."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randint(-(2**63), 2**63 - 1, (_WEIGHTS,), generator=generator, device="cpu") | 1
    total = source.nbytes
    for start in range(0, source.nbytes, _WEIGHTS * 8):
        chunk = _read_into_memory(source, start, min(_WEIGHTS * 8, source.nbytes - start))
        words = torch.zeros(-(-chunk.numel() // 8) * 8, dtype=torch.uint8, device=chunk.device)
        words[: chunk.numel()].copy_(chunk)
        weighted = words.view(torch.int64) * weights[: words.numel() // 8].to(chunk.device)
        total = (total * 0x9E3779B97F4A7C15 + int(weighted.sum().item())) % 2**64
    return total


class Destination:
    """Memory for this rank's part of a tensor. The part may be written in any pieces.

    memory: the memory as 1-D bytes. This is the shard itself or, if the shard's elements are not contiguous, a buffer
    that ``complete`` copies into the shard.
    """

    def __init__(self, target: Target) -> None:
        self._shard = target.shard()
        self._filled = self._shard
        if not self._shard.is_contiguous():
            self._filled = torch.empty(self._shard.shape, dtype=self._shard.dtype, device=self._shard.device)
        self.memory = view_as_bytes(self._filled)

    @property
    def is_shard(self) -> bool:
        return self._filled is self._shard

    def complete(self) -> None:
        """Copies a separate buffer into the shard.

        Call it when all pieces have arrived, on the stream that wrote them.
        """
        if not self.is_shard:
            self._shard.copy_(self._filled)


class LocalParts:
    """Writer of this rank's parts of full tensors, for a rank that has the tensors or can read them from files."""

    def __init__(self, copies: HostCopies, streams: Streams) -> None:
        self._rank = dist.get_rank()
        self._copies = copies
        self._streams = streams
        self._extra_bytes = 0

    def write(self, target: Target, value: Value) -> None:
        """Begins to write this rank's part of a tensor.

        Waits for the write only if the shard is not contiguous, or if copies of parts take too much memory.
        """
        part = target.layout.compute_part(target.shape, self._rank)
        source = make_portion(value, target.layout, part, target.dtype)
        destination = Destination(target)
        if isinstance(value, torch.Tensor):
            # After what the caller's stream makes the value with.
            self._streams.begin_loading()
        self._copies.copy(source, destination.memory)
        self._extra_bytes += source.extra_bytes
        if self._extra_bytes > _MOST_EXTRA_BYTES:
            self.finish()
        if not destination.is_shard:
            self.finish()
            destination.complete()

    def finish(self) -> None:
        """Finishes all writes, and returns when they are done."""
        # After what the caller's stream did with the shards before.
        self._streams.begin_loading()
        self._copies.finish()
        self._extra_bytes = 0


def _make_portion_of_memory(full: torch.Tensor, layout: Layout, part: LocalPart, dtype: torch.dtype) -> Portion:
    values = part.read(layout.arrange(full)).resolve_conj().resolve_neg()
    if values.dtype != dtype and values.device.type != "cpu":
        values = values.to(dtype)
    memory = view_as_bytes(values.contiguous())
    is_view = memory.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
    source = InMemory(memory, extra_bytes=0 if is_view else memory.numel())
    return source if values.dtype == dtype else Cast(source, values.dtype, dtype)


def _read_into_memory(source: Portion, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """Returns the portion's bytes in memory, 1-D: all bytes, or ``nbytes`` from ``start`` on."""
    length = source.nbytes - start if nbytes is None else nbytes
    if source.memory is not None:
        return source.memory[start : start + length]
    memory = torch.empty(length, dtype=torch.uint8, device="cpu")
    source.fill(memory, start)
    return memory
