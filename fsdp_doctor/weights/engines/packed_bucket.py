"""Packs tensors of any dtypes into one piece of memory with an index, so that one message carries many tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fsdp_doctor.weights.extract.plan import BUCKET_BYTES
from fsdp_doctor.weights.fsdp.decorators import disable_autograd
from fsdp_doctor.weights.fsdp.dtypes import name_dtype
from fsdp_doctor.weights.transport.streams import HomeStream

# Tensors begin at multiples of this many bytes: enough for a view in any dtype and for a kernel's vectorized reads.
_ALIGNMENT = 16


@dataclass(frozen=True)
class PackedTensor:
    """Index entry of one tensor.

    The tensor has the bytes [start, end) of the bucket; ``dtype`` is torch's name without ``torch.``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class PackedBucket:
    """Buffer of packed tensors with its index.

    buffer: a 1-D uint8 tensor on the tensors' device.
    index: plain data, which can be pickled or written as JSON.
    """

    buffer: torch.Tensor
    index: tuple[PackedTensor, ...]


@disable_autograd
def packed_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[PackedBucket]:
    """Copies tensors one by one into a bucket, and yields each full bucket. A yielded bucket belongs to the caller.

    Device memory: one bucket and one tensor. A tensor that is larger than a bucket gets a separate bucket. Raises
    ValueError if ``bucket_bytes`` is not positive, or if the tensors are on several devices.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
    buffer: torch.Tensor | None = None
    index: list[PackedTensor] = []
    for name, tensor in tensors:
        start = -(-index[-1].end // _ALIGNMENT) * _ALIGNMENT if index else 0
        if buffer is not None and start + tensor.nbytes > len(buffer):
            home = HomeStream(tensor.device)
            yield PackedBucket(buffer[: index[-1].end], tuple(index))
            home.hand_out(tensor)
            buffer, index, start = None, [], 0
        if buffer is None:
            buffer = torch.empty(max(bucket_bytes, tensor.nbytes), dtype=torch.uint8, device=tensor.device)
        if tensor.device != buffer.device:
            raise ValueError(f"{name} is on {tensor.device}, but its bucket is on {buffer.device}")
        dtype = name_dtype(tensor.dtype)
        index.append(PackedTensor(name, dtype, tuple(tensor.shape), start, start + tensor.nbytes))
        ((_, view),) = read_bucket(buffer, index[-1:])
        view.copy_(tensor.detach())
        del tensor
    if buffer is not None:
        yield PackedBucket(buffer[: index[-1].end], tuple(index))


@disable_autograd
def read_bucket(buffer: torch.Tensor, index: Sequence[PackedTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a bucket as views of its memory.

    Raises ValueError for an index that does not fit the bucket.
    """
    if buffer.dtype != torch.uint8 or buffer.ndim != 1:
        raise ValueError(f"a bucket must be uint8 and 1-D, not {buffer.dtype} and {buffer.ndim}-D")
    for entry in index:
        dtype = getattr(torch, entry.dtype, None)
        shape = torch.Size(entry.shape)
        if not isinstance(dtype, torch.dtype) or entry.end - entry.start != shape.numel() * dtype.itemsize:
            raise ValueError(f"the index does not fit the tensor: {entry}")
        if not 0 <= entry.start <= entry.end <= len(buffer):
            raise ValueError(f"the index does not fit a bucket of {len(buffer)} bytes: {entry}")
        yield entry.name, buffer[entry.start : entry.end].view(dtype).view(shape)
