"""What of a job lies on the host, by class, pinned and pageable."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fsdp_doctor.ledgers.allocators import power_of_two
from fsdp_doctor.ledgers.stage_ledger import Bytes, HostLedger, MemoryClass
from fsdp_doctor.memory.storages import storages


def host_ledger(tensors: Iterable[tuple[MemoryClass, torch.Tensor]], taken: int = 0) -> HostLedger:
    """Of those of the tensors that are on the host; memory of several is of the first. Any rank may call it alone.

    taken: what the allocator of pinned memory says that it has taken, 0 where it does not say.
    """
    held: Bytes = {}
    pinned = pinned_reserved = pageable = 0
    seen: set[int] = set()
    for memory_class, tensor in tensors:
        for storage in storages(tensor):
            nbytes = storage.nbytes()
            if storage.device.type != "cpu" or not nbytes or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            held[memory_class] = held.get(memory_class, 0) + nbytes
            if storage.is_pinned():
                pinned += nbytes
                pinned_reserved += power_of_two(nbytes)
            else:
                pageable += nbytes
    return HostLedger(held=held, pinned=pinned, pinned_reserved=max(taken, pinned_reserved), pageable=pageable)
