"""The two processes that share a device: a trainer's worker, and what stands in for a rollout engine.

Each says over a pipe what it holds, and holds it until it is told to end.
"""

from __future__ import annotations

import dataclasses
import pathlib
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor.bench.sharded_model import DTYPE, sharded
from fsdp_doctor.case import runtime
from fsdp_doctor.errors import first_line
from fsdp_doctor.ledgers.jobs import unit_for
from fsdp_doctor.ledgers.stage_ledger import Bytes, HostLedger, StageLedger
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.memory.census import held_on, owned_tensors
from fsdp_doctor.memory.counters import DeviceCounters
from fsdp_doctor.plan.meta_model import on_meta
from fsdp_doctor.rollout.rollout_request import Beside, EngineStart, RolloutRequest

# In the engine's first pieces of its key-value cache, so that none of them is larger than what is free.
_PIECE = 256 << 20


def trainer(pipe: Connection, request: RolloutRequest, beside: Beside, rank: int, scratch: pathlib.Path) -> None:
    """A worker of the trainer, which has loaded its part of the FSDP model or has not. Sends its ledger."""
    _join_devices(request, scratch)
    place = Place(rank=rank, world_size=request.ranks, local_rank=rank, num_nodes=1)
    run_device = RunDevice(type=request.device, memory=request.memory)
    here = runtime.start(
        dist.FileStore(str(scratch / "store"), request.ranks),
        place=place,
        run_device=run_device,
        backend="mixed",
        scratch=scratch,
        custom_model=None,
    )
    model = nn.Module()
    if beside == "loaded":
        whole = on_meta(request.model, request.layers).to(DTYPE[request.dtype])
        try:
            model = sharded(whole, request.strategy, "none", here.mesh(request.cut))
        except torch.OutOfMemoryError as error:
            pipe.send(first_line(error))
            return
    here.synchronize()
    held = held_on(here.device, owned_tensors(model, None))
    pipe.send(_ledger(f"trainer, FSDP model {beside}", here.rank, here.device, held))
    pipe.recv()


def engine(pipe: Connection, request: RolloutRequest, beside: Beside, scratch: pathlib.Path) -> None:
    """Asks for its share of the first device as vLLM does, and takes it: weights, and a cache.

    Sends how that ended, and its ledger.
    """
    _join_devices(request, scratch)
    device = torch.device(request.device, 0)
    if request.device == "emulated" and request.memory is not None:
        devices.limit_memory(device, request.memory)
    weights = _weights(request)
    start = _ask(request, device, sum(shape.numel() * shape.dtype.itemsize for shape in weights))
    held: list[torch.Tensor] = []
    cache: list[torch.Tensor] = []
    if not start.refusal:
        try:
            held = [torch.empty_like(shape, device=device) for shape in weights]
            cache = _cache(start, device)
        except torch.OutOfMemoryError as error:
            start = dataclasses.replace(start, refusal=first_line(error))
    classes: Bytes = {"parameters": sum(t.nbytes for t in held), "buffers": sum(t.nbytes for t in cache)}
    pipe.send((start, _ledger(f"engine beside FSDP model {beside}", 0, device, classes)))
    pipe.recv()


def _join_devices(request: RolloutRequest, scratch: pathlib.Path) -> None:
    devices.load(RunDevice(type=request.device), request.device)
    if request.device == "emulated":
        torch.get_device_module("emulated").share_devices(scratch / "devices")


def _weights(request: RolloutRequest) -> list[torch.Tensor]:
    """Of an engine: bfloat16, each tensor once, on the meta device."""
    return list(on_meta(request.model, request.layers).parameters())


def _ask(request: RolloutRequest, device: torch.device, weights: int) -> EngineStart:
    """vLLM's request_memory, in v1/worker/utils.py: the share is of all memory, and must be free at the start."""
    free, capacity = (int(nbytes) for nbytes in torch.get_device_module(device).mem_get_info(device))
    if request.memory is not None and request.memory < capacity:
        free, capacity = max(0, request.memory - (capacity - free)), request.memory
    requested = int(capacity * request.utilization)
    refusal = ""
    if free < requested:
        unit, size = unit_for(capacity)
        refusal = (
            f"Free memory on device {device} ({free / size:.2f}/{capacity / size:.2f} {unit}) on startup is less than "
            f"desired GPU memory utilization ({request.utilization:g}, {requested / size:.2f} {unit})"
        )
    elif requested < weights:
        unit, size = unit_for(capacity)
        refusal = f"No available memory for the cache blocks: the weights alone take {weights / size:.2f} {unit}"
    return EngineStart(free=free, total=capacity, requested=requested, weights=weights, refusal=refusal)


def _cache(start: EngineStart, device: torch.device) -> list[torch.Tensor]:
    """What is left of the share after the weights; what a driver takes beside a tensor is left out."""
    rest = start.requested - start.weights
    pieces = [_PIECE] * (rest // _PIECE) + [rest % _PIECE]
    return [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in pieces if nbytes]


def _ledger(job: str, rank: int, device: torch.device, held: Bytes) -> StageLedger:
    on_device = DeviceCounters(device).read().ledger(held, at_peak=held)
    host = HostLedger(held={}, pinned=0, pinned_reserved=0, pageable=0)
    return StageLedger(job=job, stage="built", rank=rank, host=host, device=on_device)
