"""A part of a full tensor of the source, in bytes, wherever it lies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from fsdp_doctor.extract.host_copies import InMemory, Portion, flat_bytes
from fsdp_doctor.fsdp.shards import HeldPart, Stretches
from fsdp_doctor.load.given import Value
from fsdp_doctor.load.layouts import Layout
from fsdp_doctor.load.safetensors_files import SafetensorsFile

_WEIGHTS = 1 << 17
# Of stretches that are read at once, and what is read for nothing between two rather than with a call of its own.
_BLOCK_BYTES = 256 << 10
_LONGEST_GAP = 64 << 10


class InFile(Portion):
    """stretches: in bytes of the file."""

    def __init__(self, file: SafetensorsFile, stretches: list[Stretches]) -> None:
        self._file, self._stretches = file, stretches
        self.nbytes = sum(some.length * some.rows for some in stretches)

    def fill(self, target: torch.Tensor, start: int) -> None:
        for some in self._stretches:
            length = some.length * some.rows
            if start < length:
                nbytes = min(length - start, target.numel())
                self._read(some, start, target[:nbytes])
                target, start = target[nbytes:], length
                if not target.numel():
                    break
            start -= length

    def _read(self, some: Stretches, start: int, target: torch.Tensor) -> None:
        memory, done = _bytes_of(target), 0
        while done < len(memory):
            row, within = divmod(start + done, some.length)
            offset = some.first + row * some.step + within
            rows = 0 if within else min((len(memory) - done) // some.length, _BLOCK_BYTES // max(some.step, 1))
            if rows > 1 and some.step - some.length <= _LONGEST_GAP:
                nbytes = rows * some.length
                target[done : done + nbytes].view(rows, -1).copy_(self._columns(some, offset, rows))
            else:
                nbytes = min(some.length - within, len(memory) - done)
                self._file.read(offset, memory[done : done + nbytes])
            done += nbytes

    def _columns(self, some: Stretches, offset: int, rows: int) -> torch.Tensor:
        """Rows that are read with one call, and with what is between them."""
        block = torch.empty((rows - 1) * some.step + some.length, dtype=torch.uint8, device="cpu")
        self._file.read(offset, _bytes_of(block))
        return block.as_strided((rows, some.length), (some.step, 1))


class Cast(Portion):
    """Of another dtype, and cast where it is read: so a tensor that is cast is never there twice."""

    def __init__(self, source: Portion, dtype: torch.dtype, to: torch.dtype) -> None:
        self._source, self._dtype, self._to = source, dtype, to
        self.nbytes = source.nbytes // dtype.itemsize * to.itemsize
        self.extra_bytes = source.extra_bytes

    def fill(self, target: torch.Tensor, start: int) -> None:
        count, size = target.numel() // self._to.itemsize, self._dtype.itemsize
        values = _some_of(self._source, start // self._to.itemsize * size, count * size)
        target.view(self._to).copy_(values.view(self._dtype))


def portion(value: Value, layout: Layout, part: HeldPart, dtype: torch.dtype) -> Portion:
    """The part, in the order in which a shard has it, and in the dtype."""
    if isinstance(value, torch.Tensor):
        return _in_memory(value.detach(), layout, part, dtype)
    stretches = layout.stretches(value.shape, part)
    size = value.dtype.itemsize
    if stretches is None:
        whole = _some_of(InFile(value.file, [Stretches(value.begin, value.shape.numel() * size, 0, 1)]))
        return _in_memory(whole.view(value.dtype).view(value.shape), layout, part, dtype)
    in_file = InFile(value.file, [some.in_bytes(value.begin, size) for some in stretches])
    return in_file if value.dtype == dtype else Cast(in_file, value.dtype, dtype)


def _in_memory(full: torch.Tensor, layout: Layout, part: HeldPart, dtype: torch.dtype) -> Portion:
    own = part.read(layout.arranged(full)).resolve_conj().resolve_neg()
    if own.dtype != dtype and own.device.type != "cpu":
        own = own.to(dtype)
    memory = flat_bytes(own.contiguous())
    is_view = memory.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
    source = InMemory(memory, extra_bytes=0 if is_view else memory.numel())
    return source if own.dtype == dtype else Cast(source, own.dtype, dtype)


def _some_of(source: Portion, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """In memory, 1-D: all of it, or so many bytes from ``start`` on."""
    length = source.nbytes - start if nbytes is None else nbytes
    if source.memory is not None:
        return source.memory[start : start + length]
    memory = torch.empty(length, dtype=torch.uint8, device="cpu")
    source.fill(memory, start)
    return memory


def fingerprint(source: Portion) -> int:
    """A number that two portions share if their bytes are the same, and else by an accident of one in 2 ** 64."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randint(-(2**63), 2**63 - 1, (_WEIGHTS,), generator=generator, device="cpu") | 1
    total = source.nbytes
    for part in _chunks(source):
        words = torch.zeros(-(-part.numel() // 8) * 8, dtype=torch.uint8, device=part.device)
        words[: part.numel()].copy_(part)
        weighed = words.view(torch.int64) * weights[: words.numel() // 8].to(part.device)
        total = (total * 0x9E3779B97F4A7C15 + int(weighed.sum().item())) % 2**64
    return total


def _chunks(source: Portion) -> Iterator[torch.Tensor]:
    length = _WEIGHTS * 8
    for start in range(0, source.nbytes, length):
        yield _some_of(source, start, min(length, source.nbytes - start))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor in host memory."""
    memory = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr()) if tensor.numel() else b""
    return memoryview(memory).cast("B")
