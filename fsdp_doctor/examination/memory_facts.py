"""What is held beside the shards, as this rank can read it: attributes, and the dictionaries that there are."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_doctor.fsdp import private
from fsdp_doctor.fsdp.reader import HeldModel
from fsdp_doctor.memory.snapshot import device_bytes, storages


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """In bytes, and of tensors by their names.

    unsharded, unsharded_bytes: parameters that stand unsharded beside their shards; all_unsharded: whether all do.
    gradients, gradient_bytes: on the device, of shards that an offload by hand took to the host.
    former, former_bytes: flat parameters whose former memory the modules' parameters still hold, after such an offload.
    copies: of each dictionary with most of the model's names, and with device memory that is not the model's, how many
        tensors it has and how much memory.
    """

    unsharded: tuple[str, ...] = ()
    unsharded_bytes: int = 0
    all_unsharded: bool = False
    gradients: tuple[str, ...] = ()
    gradient_bytes: int = 0
    former: tuple[str, ...] = ()
    former_bytes: int = 0
    copies: tuple[tuple[int, int], ...] = ()


def read_memory_facts(held: HeldModel) -> MemoryFacts:
    """held: of the model, as the reader gives it."""
    unsharded = [(names, tensor) for names, tensor in _unsharded(held) if _bytes_of([tensor])]
    gradients = list(_left_gradients(held))
    former = [(name, tensor) for name, tensor in _views_of_former_memory(held) if _bytes_of([tensor])]
    sharded = [*(tensor for tensor in held.parameters if tensor.unit is not None), *held.fsdp1_units]
    return MemoryFacts(
        unsharded=tuple(names for names, _ in unsharded),
        unsharded_bytes=_bytes_of(tensor for _, tensor in unsharded),
        all_unsharded=bool(sharded) and len(unsharded) == len(sharded),
        gradients=tuple(name for name, _ in gradients),
        gradient_bytes=_bytes_of(gradient for _, gradient in gradients),
        former=tuple(dict.fromkeys(name for name, _ in former)),
        former_bytes=_bytes_of(view for _, view in former),
        copies=tuple(_copies(held)),
    )


def _unsharded(held: HeldModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((own.names[0], own.shown) for own in held.parameters if own.shown is not own.tensor)
    for unit in held.fsdp1_units:
        flat = unit.flat_parameter.detach()
        if unit.is_sharded and flat.shape != unit.memories[0].shape:
            yield unit.flat_name, flat


def _left_gradients(held: HeldModel) -> Iterator[tuple[str, torch.Tensor]]:
    for own in held.parameters:
        by_hand = own.unit is not None and not own.unit.offloads
        if by_hand and own.tensor.grad is not None and private.local_tensor(own.tensor).is_cpu:
            yield own.names[0], own.tensor.grad
    for unit in held.fsdp1_units:
        if not unit.offloads and unit.memories[0].is_cpu:
            yield from ((unit.flat_name, owner.grad) for owner in unit.optimized if owner.grad is not None)


def _views_of_former_memory(held: HeldModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Of a unit that is not sharded the modules have views of the flat parameter, and a move of it takes none along."""
    for unit in held.fsdp1_units:
        if not unit.is_sharded and not unit.offloads:
            own = {id(storage) for storage in storages(unit.flat_parameter.detach())}
            for view in unit.views:
                if all(id(storage) not in own for storage in storages(view)):
                    yield unit.flat_name, view


def _copies(held: HeldModel) -> Iterator[tuple[int, int]]:
    """A dictionary is known by its keys: a state dict's are the names of the model, and no module's own have dots."""
    names = [own_names[0] for own_names in held.all_names() if "." in own_names[0]]
    own = {id(storage) for tensor in _of_model(held) for storage in storages(tensor)}
    for one in _dictionaries():
        if names and names[0] in one and 2 * sum(name in one for name in names) > len(names):
            tensors = [value for value in one.values() if isinstance(value, torch.Tensor)]
            others = [tensor for tensor in tensors if all(id(storage) not in own for storage in storages(tensor))]
            if nbytes := _bytes_of(others):
                yield len(others), nbytes


def _dictionaries() -> Iterator[dict[Any, Any]]:
    for one in gc.get_objects():
        if type(one) in (dict, OrderedDict) and len(one) > 1:
            yield one


def _of_model(held: HeldModel) -> Iterator[torch.Tensor]:
    for tensor in (*held.parameters, *held.buffers, *held.transient_buffers):
        yield from (tensor.tensor, tensor.shown)
    for unit in held.fsdp1_units:
        yield from (*unit.memories, unit.flat_parameter.detach(), *unit.shown.values())


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """On a device; each storage once."""
    found = {id(storage): storage for tensor in tensors for storage in storages(tensor)}
    return sum(device_bytes(storage) for storage in found.values() if storage.device.type != "cpu")
