"""Counts the memory of a live job on one rank: tensors by class, and the counters of the allocator and the driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_doctor.errors import CannotRun
from fsdp_doctor.examination.memory_records import (
    Bytes,
    DeviceMemory,
    HostMemory,
    JobStage,
    MemoryClass,
    StageMemory,
    add_unexplained,
    round_to_power_of_two,
    round_up,
)
from fsdp_doctor.text import read_first_line
from fsdp_doctor.weights.fsdp import private, reader
from fsdp_doctor.weights.fsdp.decorators import defer_garbage_collection


def is_wrapper(kind: type) -> bool:
    """Returns whether tensors of the type wrap other tensors and do not own memory, like a DTensor."""
    return hasattr(kind, "__tensor_flatten__")


def list_storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Lists the storages of a tensor, or of the tensors that it wraps (a DTensor's local tensor); none on meta."""
    if private.is_sharded_tensor(tensor):
        shards: Any = tensor
        yield from (storage for shard in shards.local_shards() for storage in list_storages(shard.tensor))
    elif isinstance(tensor, DTensor):
        yield from list_storages(private.read_local_tensor(tensor))
    elif is_wrapper(type(tensor)):
        wrapper: Any = tensor
        inner = (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
        yield from (storage for part in inner if isinstance(part, torch.Tensor) for storage in list_storages(part))
    elif tensor.device.type != "meta" and tensor.layout == torch.strided:
        yield tensor.untyped_storage()


def list_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Lists the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from list_tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from list_tensors(inner)


def count_device_bytes(storage: torch.UntypedStorage) -> int:
    """Counts the bytes that the device's allocator reports for a storage."""
    return round_up(storage.nbytes())


def list_owned_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[MemoryClass, torch.Tensor]]:
    """Lists every tensor of a model and its optimizer with its class, in any state of the model.

    A tensor's memory may be listed under several classes; only the first listing counts. Only attributes are read; any
    single rank may call this function.
    """
    parts = reader.read(model)
    yield from (("parameters", parameter.tensor) for parameter in parts.parameters)
    yield from (("parameters", memory) for unit in parts.fsdp1_units for memory in unit.memories)
    yield from (("buffers", buffer.tensor) for buffer in (*parts.buffers, *parts.transient_buffers))
    owners = [tensor for parameter in parts.parameters for tensor in (parameter.tensor, parameter.shown)]
    owners += [tensor for unit in parts.fsdp1_units for tensor in unit.optimized]
    if optimizer is not None:
        owners += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    yield from (("gradients", owner.grad) for owner in owners if owner.is_leaf and owner.grad is not None)
    host_gradients = (unit.host_gradient for unit in parts.fsdp1_units if unit.host_gradient is not None)
    yield from (("gradients", gradient) for gradient in host_gradients)
    if optimizer is not None:
        # Not `optimizer.state_dict()`, which a framework may have wrapped with a gather.
        yield from (("optimizer state", tensor) for tensor in list_tensors(list(optimizer.state.values())))
    # Those that modules have instead of their shards, in separate memory.
    shown = (parameter.shown for parameter in parts.parameters if parameter.shown is not parameter.tensor)
    yield from (("unsharded parameters", tensor) for tensor in shown)
    for unit in parts.fsdp1_units:
        yield "unsharded parameters", unit.flat_parameter.detach()
        yield from (("unsharded parameters", tensor) for tensor in unit.shown.values())
        yield from (("unsharded parameters", view) for view in unit.views)


def sum_bytes_on(device: torch.device, tensors: Iterable[tuple[MemoryClass, torch.Tensor]]) -> Bytes:
    """Sums the bytes of the tensors on a device by class, as its allocator counts them.

    A storage that is listed several times counts once, for the class that is listed first.
    """
    by_class: Bytes = {}
    seen: set[int] = set()
    for memory_class, tensor in tensors:
        for storage in list_storages(tensor):
            if storage.device == device and storage.nbytes() and id(storage) not in seen:
                seen.add(id(storage))
                by_class[memory_class] = by_class.get(memory_class, 0) + count_device_bytes(storage)
    return by_class


def count_host_memory(tensors: Iterable[tuple[MemoryClass, torch.Tensor]], taken: int = 0) -> HostMemory:
    """Counts the bytes of the tensors on the host. Any single rank may call this function.

    A storage that is listed several times counts once, for the class that is listed first.

    taken: bytes that the allocator of pinned memory reports; 0 if it reports none.
    """
    by_class: Bytes = {}
    pinned = pinned_reserved = pageable = 0
    seen: set[int] = set()
    for memory_class, tensor in tensors:
        for storage in list_storages(tensor):
            nbytes = storage.nbytes()
            if storage.device.type != "cpu" or not nbytes or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            by_class[memory_class] = by_class.get(memory_class, 0) + nbytes
            if storage.is_pinned():
                pinned += nbytes
                pinned_reserved += round_to_power_of_two(nbytes)
            else:
                pageable += nbytes
    return HostMemory(held=by_class, pinned=pinned, pinned_reserved=max(taken, pinned_reserved), pageable=pageable)


_NEEDED = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "mem_get_info")


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The memory of one device, in bytes.

    allocated, reserved: the present values of the allocator's counters.
    peak, peak_reserved: the highest values of the counters since the last reset.
    capacity: the device's memory, or this process's limit if one is set.
    elsewhere: memory in use that this process's allocator has not reserved.
    """

    allocated: int
    peak: int
    reserved: int
    peak_reserved: int
    capacity: int
    elsewhere: int

    def make_device_memory(self, by_class: Bytes, at_peak: Bytes) -> DeviceMemory:
        """Makes the ledger of a device: its memory by class.

        by_class: bytes of known classes that are allocated now.
        at_peak: bytes of known classes at the peak.
        """
        return DeviceMemory(
            held=add_unexplained(by_class, self.allocated),
            at_peak=add_unexplained(at_peak, self.peak),
            allocated=self.allocated,
            peak=self.peak,
            reserved=self.reserved,
            peak_reserved=self.peak_reserved,
            capacity=self.capacity,
            elsewhere=self.elsewhere,
        )


def check_counted(device_type: str) -> None:
    """Raises CannotRun if torch does not count the memory of this device type. Creates no context on a device."""
    if device_type == "cpu":
        raise CannotRun("torch does not measure the memory of the CPU: use --device emulated, or an accelerator")
    module = torch.get_device_module(device_type)
    if missing := [name for name in _NEEDED if not hasattr(module, name)]:
        raise CannotRun(
            f"the memory of devices of type {device_type} cannot be measured: torch.{device_type} has no {missing[0]}"
        )


class DeviceCounters:
    """Reads the memory counters of one device. Raises CannotRun for a device type without counters."""

    def __init__(self, device: torch.device) -> None:
        check_counted(device.type)
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def synchronize(self) -> None:
        self._module.synchronize(self._device)

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self._device)

    def read(self) -> Counters:
        """Reads all counters. Raises CannotRun if the driver does not report the device's free memory."""
        try:
            free, total = self._module.mem_get_info(self._device)
        except RuntimeError as error:
            reason = read_first_line(error)
            raise CannotRun(f"the driver of {self._device} does not report its free memory: {reason}") from None
        reserved = int(self._module.memory_reserved(self._device))
        # What this process may have of the device's memory; of the emulated device it is all.
        share = 1.0
        if self._device.type != "emulated" and hasattr(self._module, "get_per_process_memory_fraction"):
            share = float(self._module.get_per_process_memory_fraction(self._device))
        return Counters(
            allocated=int(self._module.memory_allocated(self._device)),
            peak=int(self._module.max_memory_allocated(self._device)),
            reserved=reserved,
            peak_reserved=int(self._module.max_memory_reserved(self._device)),
            capacity=int(total * share),
            elsewhere=max(0, int(total) - int(free) - reserved),
        )

    def read_pinned_reserved(self) -> int:
        """Reads the bytes of pinned host memory that this process's allocator holds; 0 if it reports none."""
        stats: dict[str, int] = getattr(self._module, "host_memory_stats", dict)()
        return int(stats.get("allocated_bytes.current", 0))

    def free_workspaces(self) -> int:
        """Frees the workspaces of cuBLAS, which operators never release, and returns their bytes."""
        before = int(self._module.memory_allocated(self._device))
        private.release_workspaces(self._device)
        return before - int(self._module.memory_allocated(self._device))


@defer_garbage_collection
def measure_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    stage: JobStage = "trained",
    job: str = "a live job",
) -> StageMemory:
    """Measures the memory of this rank's device and host, in bytes by class, between two calls of the model.

    Any single rank may call this function. It reads attributes and counters; it changes, communicates and copies
    nothing, and never waits. While a copy is under way, its target already counts. Device bytes are counted like the
    allocator does, in blocks of 512. Memory that belongs to neither the model nor the optimizer is "unexplained":
    activations, a state dict that is kept, another model. In the result, ``peak`` and ``peak_reserved`` are the highest
    values since the peaks were last reset, and ``at_peak`` is not divided into classes. ``device`` is None if the model
    computes on the CPU. Raises CannotRun for a device whose memory torch does not count.

    optimizer: the optimizer of the model; without it, the optimizer's state counts as unexplained.
    stage, job: labels of the ledger, for a table or a picture of several ledgers.
    """
    device = compute_device(model)
    owned = list(list_owned_tensors(model, optimizer))
    rank = dist.get_rank() if dist.is_initialized() else 0
    if device.type == "cpu":
        return StageMemory(job=job, stage=stage, rank=rank, host=count_host_memory(owned))
    counters = DeviceCounters(device)
    on_device = counters.read().make_device_memory(sum_bytes_on(device, owned), at_peak={})
    host = count_host_memory(owned, counters.read_pinned_reserved())
    return StageMemory(job=job, stage=stage, rank=rank, device=on_device, host=host)


def compute_device(model: nn.Module) -> torch.device:
    """Returns the device on which the FSDP units compute, with an index.

    For a model without FSDP it is the device of the first parameter; the CPU if the parameter is on meta or missing.
    """
    parts = reader.read(model)
    places = [
        *(unit.compute_device for unit in parts.fsdp1_units),
        *(unit.compute_device for unit in parts.fsdp2_units),
        *(parameter.tensor.device for parameter in parts.parameters),
        torch.device("cpu"),
    ]
    device = places[0]
    if device.type in ("cpu", "meta") or device.index is not None:
        return torch.device("cpu") if device.type == "meta" else device
    return torch.device(device.type, torch.get_device_module(device).current_device())
