"""A part of a full tensor of the source, in bytes, wherever it lies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from fsdp_doctor.extract.host_copies import InMemory, Portion, flat_bytes
from fsdp_doctor.fsdp.shards import HeldPart
from fsdp_doctor.load.given import Value
from fsdp_doctor.load.layouts import Layout
from fsdp_doctor.load.safetensors_files import SafetensorsFile

_WEIGHTS = 1 << 17


class InFile(Portion):
    """stretches: (where in the file, how many bytes) of each."""

    def __init__(self, file: SafetensorsFile, stretches: list[tuple[int, int]]) -> None:
        self._file, self._stretches = file, stretches
        self.nbytes = sum(length for _, length in stretches)

    def fill(self, target: torch.Tensor, start: int) -> None:
        into = _bytes_of(target)
        for offset, length in self._stretches:
            if not into:
                break
            if start < length:
                count = min(length - start, len(into))
                self._file.read(offset + start, into[:count])
                into, start = into[count:], 0
            else:
                start -= length


@torch.no_grad()
def portion(value: Value, layout: Layout, part: HeldPart, dtype: torch.dtype) -> Portion:
    """The part, in the order in which a shard has it, and in the dtype."""
    if isinstance(value, torch.Tensor):
        return InMemory(_flat_bytes(part.read(layout.arranged(value.detach())).to(dtype)))
    stretches = layout.stretches(value.shape, part)
    size = value.dtype.itemsize
    if stretches is None:
        whole = read_whole(InFile(value.file, [(value.begin, value.shape.numel() * size)]))
        return portion(whole.view(value.dtype).view(value.shape), layout, part, dtype)
    in_file = InFile(value.file, [(value.begin + first * size, count * size) for first, count in stretches])
    if value.dtype == dtype:
        return in_file
    return InMemory(_flat_bytes(read_whole(in_file).view(value.dtype).to(dtype)))


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return flat_bytes(tensor.resolve_conj().resolve_neg().contiguous())


def read_whole(source: Portion) -> torch.Tensor:
    """Its bytes in memory, 1-D."""
    if source.memory is not None:
        return source.memory
    memory = torch.empty(source.nbytes, dtype=torch.uint8)
    source.fill(memory, 0)
    return memory


@torch.no_grad()
def fingerprint(source: Portion) -> int:
    """A number that two portions share if their bytes are the same, and else by an accident of one in 2 ** 64."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randint(-(2**63), 2**63 - 1, (_WEIGHTS,), generator=generator) | 1
    total = source.nbytes
    for part in _chunks(source):
        words = torch.zeros(-(-part.numel() // 8) * 8, dtype=torch.uint8, device=part.device)
        words[: part.numel()].copy_(part)
        weighed = words.view(torch.int64) * weights[: words.numel() // 8].to(part.device)
        total = (total * 0x9E3779B97F4A7C15 + int(weighed.sum().item())) % 2**64
    return total


def _chunks(source: Portion) -> Iterator[torch.Tensor]:
    length = _WEIGHTS * 8
    if source.memory is not None:
        yield from source.memory.split(length)
        return
    for start in range(0, source.nbytes, length):
        chunk = torch.empty(min(length, source.nbytes - start), dtype=torch.uint8)
        source.fill(chunk, start)
        yield chunk


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor in host memory."""
    memory = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr()) if tensor.numel() else b""
    return memoryview(memory).cast("B")
