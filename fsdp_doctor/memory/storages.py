"""Tensors as the memory under them: each storage once, however many views it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_doctor.fsdp import private
from fsdp_doctor.ledgers.allocators import rounded


def is_wrapper(kind: type) -> bool:
    """Whether tensors of the type hold others, such as a DTensor, and have no memory themselves."""
    return hasattr(kind, "__tensor_flatten__")


def storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Those of one tensor: of a DTensor its local one, of any other wrapper those of what it wraps, none on meta."""
    if private.is_sharded_tensor(tensor):
        shards: Any = tensor
        yield from (storage for shard in shards.local_shards() for storage in storages(shard.tensor))
    elif isinstance(tensor, DTensor):
        yield from storages(private.local_tensor(tensor))
    elif is_wrapper(type(tensor)):
        wrapper: Any = tensor
        inner = (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
        yield from (storage for part in inner if isinstance(part, torch.Tensor) for storage in storages(part))
    elif tensor.device.type != "meta" and tensor.layout == torch.strided:
        yield tensor.untyped_storage()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)


def device_bytes(storage: torch.UntypedStorage) -> int:
    """What the device's allocator counts for it."""
    return rounded(storage.nbytes())
