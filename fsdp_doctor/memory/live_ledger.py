"""The ledger of a live job, of what can be seen at once: nobody watched its stages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor.fsdp import reader
from fsdp_doctor.fsdp.garbage_collection import without_garbage_collection
from fsdp_doctor.ledgers.stage_ledger import JobStage, StageLedger
from fsdp_doctor.memory.census import held_on, owned_tensors
from fsdp_doctor.memory.counters import DeviceCounters
from fsdp_doctor.memory.host_census import host_ledger


@without_garbage_collection
def ledger(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    stage: JobStage = "trained",
    job: str = "a live job",
) -> StageLedger:
    """What this rank's device and host hold now, by class. Any one rank may call it alone, between two calls of model.

    Attributes and counters are read; nothing is changed, communicated, copied or waited for, so a copy under way counts
    where its tensor is. Bytes of a device are as its allocator counts them, in blocks of 512. What neither the model
    nor the optimizer holds is "unexplained": activations, a state dict that somebody holds, another model.
    ``peak`` and ``peak_reserved`` are the most since the peaks were last reset, and ``at_peak`` names nothing of them.

    optimizer: left out, its state is unexplained. stage, job: what the ledger says that it is of, for a table or a
    picture of several. There is no device in it where the model computes on the CPU. Raises CannotRun for a device
    whose memory nobody counts.
    """
    device = compute_device(model)
    owned = list(owned_tensors(model, optimizer))
    rank = dist.get_rank() if dist.is_initialized() else 0
    if device.type == "cpu":
        return StageLedger(job=job, stage=stage, rank=rank, host=host_ledger(owned))
    counters = DeviceCounters(device)
    on_device = counters.read().ledger(held_on(device, owned), at_peak={})
    host = host_ledger(owned, counters.pinned_reserved())
    return StageLedger(job=job, stage=stage, rank=rank, device=on_device, host=host)


def compute_device(model: nn.Module) -> torch.device:
    """Where FSDP's units compute, with an index; of another model where its first parameter lies."""
    held = reader.read(model)
    places = [
        *(unit.compute_device for unit in held.fsdp1_units),
        *(unit.compute_device for unit in held.fsdp2_units),
        *(parameter.tensor.device for parameter in held.parameters),
        torch.device("cpu"),
    ]
    device = places[0]
    if device.type in ("cpu", "meta") or device.index is not None:
        return torch.device("cpu") if device.type == "meta" else device
    return torch.device(device.type, torch.get_device_module(device).current_device())
