"""Whose memory it is: the tensors that a sharded model and its optimizer hold, by class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from fsdp_doctor.fsdp import reader
from fsdp_doctor.fsdp.reader import HeldModel
from fsdp_doctor.ledgers.stage_ledger import Bytes, MemoryClass
from fsdp_doctor.memory.storages import device_bytes, storages, tensors_in


def owned_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[MemoryClass, torch.Tensor]]:
    """Every tensor with its class, in any state of the model. Reads attributes only; any rank may call it alone.

    Memory that two classes have is of the first one that it is yielded under.
    """
    held = reader.read(model)
    yield from (("parameters", tensor) for tensor in _parameters(held))
    yield from (("buffers", buffer.tensor) for buffer in (*held.buffers, *held.transient_buffers))
    yield from (("gradients", tensor) for tensor in _gradients(held, optimizer))
    if optimizer is not None:
        # Not `optimizer.state_dict()`, which a framework may have wrapped with a gather.
        yield from (("optimizer state", tensor) for tensor in tensors_in(list(optimizer.state.values())))
    yield from (("unsharded parameters", tensor) for tensor in _unsharded(held))


def held_on(device: torch.device, tensors: Iterable[tuple[MemoryClass, torch.Tensor]]) -> Bytes:
    """Of those of the tensors that are on the device, as its allocator counts; memory of several is of the first."""
    held: Bytes = {}
    seen: set[int] = set()
    for memory_class, tensor in tensors:
        for storage in storages(tensor):
            if storage.device == device and storage.nbytes() and id(storage) not in seen:
                seen.add(id(storage))
                held[memory_class] = held.get(memory_class, 0) + device_bytes(storage)
    return held


def _parameters(held: HeldModel) -> Iterator[torch.Tensor]:
    yield from (parameter.tensor for parameter in held.parameters)
    yield from (memory for unit in held.fsdp1_units for memory in unit.memories)


def _gradients(held: HeldModel, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    owners = [tensor for parameter in held.parameters for tensor in (parameter.tensor, parameter.shown)]
    owners += [tensor for unit in held.fsdp1_units for tensor in unit.optimized]
    if optimizer is not None:
        owners += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    yield from (owner.grad for owner in owners if owner.is_leaf and owner.grad is not None)
    yield from (unit.host_gradient for unit in held.fsdp1_units if unit.host_gradient is not None)


def _unsharded(held: HeldModel) -> Iterator[torch.Tensor]:
    """What modules show in the place of their shards, of memory of its own."""
    yield from (parameter.shown for parameter in held.parameters if parameter.shown is not parameter.tensor)
    for unit in held.fsdp1_units:
        yield unit.flat_parameter.detach()
        yield from unit.shown.values()
        yield from unit.views
