"""``fsdp-doctor memory rollout``: starts a rollout engine on a device beside a trainer's worker (verl issue 4229).

The worker and the engine are separate processes. Each reports over a pipe the memory that it uses, and keeps it
until it is told to end. The engine is a stand-in: it asks for its share of the device's memory as vLLM does, and takes
it for weights and a cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor.bench.sharded_model import DTYPE, shard_model
from fsdp_doctor.case.runtime import start as start_runtime
from fsdp_doctor.errors import CannotRun, read_first_line
from fsdp_doctor.machine import devices
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.matrix.axes import Backend, Offload, Sharding, Staging, Strategy
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.memory.snapshot import DeviceCounters, check_counted, list_owned_tensors, sum_bytes_on
from fsdp_doctor.memory_use.records import (
    CLASSES,
    Bytes,
    DeviceMemory,
    HostMemory,
    MemoryClass,
    MemoryFile,
    StageMemory,
    format_memory_file,
)
from fsdp_doctor.memory_use.views import choose_unit
from fsdp_doctor.plan.meta_model import build_on_meta

# Whether the trainer's worker has loaded the FSDP model, or only has its context.
TrainerState: TypeAlias = Literal["loaded", "not loaded"]

# The shardings of a trainer.
SHARDINGS: dict[Sharding, str] = {
    Sharding.SIZE1: "fsdp_size=1: every rank has the whole model",
    Sharding.FULL: "one shard group over all ranks",
}
_ENGINE_CLASSES: dict[MemoryClass, str] = {"parameters": "weights", "buffers": "key-value cache"}
_TRAINER_CLASSES: dict[MemoryClass, str] = {"parameters": "FSDP parameters"}
_SECONDS_TO_END = 20
# Of the engine's cache, so that no tensor is larger than what is free.
_PIECE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """The trainer and the engine that are to share a device.

    model: a named shape, or a directory with a config.json. layers: instead of the model's own number.
    dtype: of the trainer's parameters, ``bf16`` or ``fp32``; the engine's weights are bfloat16.
    utilization: the share of the device's memory that the engine asks for.
    device: its type. memory: bytes that a device has, None for all that there are. ranks: of the trainer.
    """

    model: str
    layers: int | None
    strategy: Strategy
    sharding: Sharding
    dtype: str
    utilization: float
    device: str
    memory: int | None
    ranks: int


@dataclass(frozen=True, kw_only=True)
class EngineStart:
    """How the engine's start ended.

    free, total: bytes of the device when it asked. requested: bytes that it asked for. weights: bytes of the model,
    unsharded, in bfloat16. refusal: in vLLM's words; empty where the engine started.
    """

    free: int
    total: int
    requested: int
    weights: int
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class RolloutAttempt:
    """One start of the engine. trainer, engine: the memory of the first rank's process, and of the engine's."""

    trainer_state: TrainerState
    trainer: StageMemory
    engine: StageMemory
    start: EngineStart


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change of one setting. frees: bytes of the device. suffices: whether the engine would start with it."""

    setting: str
    frees: int
    suffices: bool


def start_engine_beside_trainer(request: RolloutRequest, weights: Sequence[int]) -> list[RolloutAttempt]:
    """Starts the engine beside a worker that has loaded the model, then beside one that has not.

    weights: elements of each of the model's parameters. Raises CannotRun where there are fewer devices than ranks,
    where their memory is not counted, where the model does not fit, and where a process ends before it has reported.
    """
    devices.load(RunDevice(type=request.device), request.device)
    check_counted(request.device)
    devices.check_there_is_one(request.device, rank=request.ranks - 1, local_rank=request.ranks - 1)
    # Imports torch once for all processes, and makes no CUDA context.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return [_attempt_start(context, request, weights, state) for state in ("loaded", "not loaded")]


def _attempt_start(
    context: ForkServerContext, request: RolloutRequest, weights: Sequence[int], state: TrainerState
) -> RolloutAttempt:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as running:
        scratch = pathlib.Path(directory)

        def start(name: str, function: Any, *arguments: Any) -> RunningProcess:
            return running.enter_context(RunningProcess(context, name, function, request, state, scratch, *arguments))

        ranks = [start(f"rank {rank} of the trainer", _run_trainer, rank) for rank in range(request.ranks)]
        reports = [rank.receive_report() for rank in ranks]
        for report in reports:
            if isinstance(report, str):
                raise CannotRun(f"the trainer's worker cannot load the model: {report}")
        ended, engine = start("the engine", _run_engine, weights).receive_report()
        return RolloutAttempt(trainer_state=state, trainer=reports[0], engine=engine, start=ended)


class RunningProcess:
    """A process that runs a function with a pipe, from its start until the end of the ``with`` block."""

    def __init__(self, context: ForkServerContext | SpawnContext, name: str, function: Any, *arguments: Any) -> None:
        self._name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> RunningProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(_SECONDS_TO_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def receive_report(self) -> Any:
        """The next object that the process sends. Raises CannotRun where the process ends first."""
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join(_SECONDS_TO_END)
            code = self._process.exitcode
            raise CannotRun(f"{self._name} ended with exit code {code} before it reported its memory") from None


def _run_trainer(
    pipe: Connection, request: RolloutRequest, state: TrainerState, scratch: pathlib.Path, rank: int
) -> None:
    """Sends the ledger of a worker of the trainer, or a sentence where the model does not fit."""
    _share_devices(request, scratch)
    try:
        device, model = _load_trainer(request, state, rank, scratch)
    except torch.OutOfMemoryError as error:
        pipe.send(read_first_line(error))
        return
    by_class = sum_bytes_on(device, list_owned_tensors(model, None))
    pipe.send(_make_stage_memory(f"trainer, FSDP model {state}", rank, device, by_class))
    pipe.recv()


def _load_trainer(
    request: RolloutRequest, state: TrainerState, rank: int, scratch: pathlib.Path
) -> tuple[torch.device, nn.Module]:
    """Joins the trainer's process group, and loads the model if ``state`` says so. Every rank must call it."""
    runtime = start_runtime(
        dist.FileStore(str(scratch / "store"), request.ranks),
        place=Place(rank=rank, world_size=request.ranks, local_rank=rank, num_nodes=1),
        run_device=RunDevice(type=request.device, memory=request.memory),
        backend=Backend.MIXED,
        scratch=scratch,
        custom_model=None,
    )
    model = nn.Module()
    if state == "loaded":
        whole = build_on_meta(request.model, request.layers, dtype=DTYPE[request.dtype])
        scenario = Scenario(strategy=request.strategy, offload=Offload(), staging=Staging.UNSTAGED)
        model = shard_model(whole, scenario, runtime.make_mesh(request.sharding))
    runtime.synchronize()
    return runtime.device, model


def _run_engine(
    pipe: Connection, request: RolloutRequest, state: TrainerState, scratch: pathlib.Path, weights: Sequence[int]
) -> None:
    """Asks for the engine's share of the first device, takes it, and sends how that ended and the ledger."""
    _share_devices(request, scratch)
    device = torch.device(request.device, 0)
    if request.device == "emulated" and request.memory is not None:
        devices.limit_memory(device, request.memory)
    start = _request_memory(request, device, sum(weights) * torch.bfloat16.itemsize)
    parameters: list[torch.Tensor] = []
    cache: list[torch.Tensor] = []
    if not start.refusal:
        rest = start.requested - start.weights
        pieces = [_PIECE_BYTES] * (rest // _PIECE_BYTES) + [rest % _PIECE_BYTES]
        try:
            parameters = [torch.empty(numel, dtype=torch.bfloat16, device=device) for numel in weights]
            cache = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in pieces if nbytes]
        except torch.OutOfMemoryError as error:
            start = dataclasses.replace(start, refusal=read_first_line(error))
    by_class: Bytes = {"parameters": sum(t.nbytes for t in parameters), "buffers": sum(t.nbytes for t in cache)}
    pipe.send((start, _make_stage_memory(f"engine beside FSDP model {state}", 0, device, by_class)))
    pipe.recv()


def _share_devices(request: RolloutRequest, scratch: pathlib.Path) -> None:
    devices.load(RunDevice(type=request.device), request.device)
    if request.device == "emulated":
        torch.get_device_module("emulated").share_devices(scratch / "devices")


def _request_memory(request: RolloutRequest, device: torch.device, weights: int) -> EngineStart:
    """vLLM's request_memory, in v1/worker/utils.py: the share is of all memory, and must be free at the start."""
    free, capacity = (int(nbytes) for nbytes in torch.get_device_module(device).mem_get_info(device))
    if request.memory is not None and request.memory < capacity:
        free, capacity = max(0, request.memory - (capacity - free)), request.memory
    requested = int(capacity * request.utilization)
    unit, size = choose_unit(capacity)
    refusal = ""
    if free < requested:
        refusal = (
            f"Free memory on device {device} ({free / size:.2f}/{capacity / size:.2f} {unit}) on startup is less than "
            f"desired GPU memory utilization ({request.utilization:g}, {requested / size:.2f} {unit})"
        )
    elif requested < weights:
        refusal = f"No available memory for the cache blocks: the weights alone take {weights / size:.2f} {unit}"
    return EngineStart(free=free, total=capacity, requested=requested, weights=weights, refusal=refusal)


def _make_stage_memory(job: str, rank: int, device: torch.device, by_class: Bytes) -> StageMemory:
    on_device = DeviceCounters(device).read().make_device_memory(by_class, at_peak=by_class)
    host = HostMemory(held={}, pinned=0, pinned_reserved=0, pageable=0)
    return StageMemory(job=job, stage="built", rank=rank, host=host, device=on_device)


def find_remedies(request: RolloutRequest, loaded: RolloutAttempt) -> list[Remedy]:
    """Settings with which an engine may start whose share is not free, or too small for its weights.

    loaded: the start beside a worker that has loaded the model.
    """
    start, device = loaded.start, loaded.trainer.device
    assert device is not None
    if start.requested < start.weights:
        return _propose_larger_share(start)
    lacking = start.requested - start.free
    if lacking <= 0:
        return []
    ranks = max(request.ranks, 8)
    parameters = device.held.get("parameters", 0) if request.sharding.keeps_whole_tensors else 0
    freed = {
        "do not build the FSDP model in a worker that only generates": device.reserved,
        "param_offload=true, and the cache emptied after the load": device.reserved,
        f"fsdp_size=-1, over {ranks} ranks": parameters - parameters // ranks,
        "empty the cache after the load (verl PR 5384)": device.reserved - device.allocated,
    }
    freeing = [
        Remedy(setting=setting, frees=nbytes, suffices=nbytes >= lacking) for setting, nbytes in freed.items() if nbytes
    ]
    return [*freeing, *_propose_smaller_share(start)]


def _propose_smaller_share(start: EngineStart) -> list[Remedy]:
    # Two digits, rounded down.
    share = int(100 * start.free / start.total) / 100
    if share == 0:
        return []
    setting = f"gpu_memory_utilization={share:g}: the engine has so much less for its cache"
    return [Remedy(setting=setting, frees=0, suffices=int(start.total * share) > start.weights)]


def _propose_larger_share(start: EngineStart) -> list[Remedy]:
    """The least share of two digits in which the weights have room, and something is left for a cache."""
    for percent in range(1, 101):
        if (nbytes := int(start.total * percent / 100)) > start.weights:
            setting = f"gpu_memory_utilization={percent / 100:g}: the share has room for the weights"
            return [Remedy(setting=setting, frees=0, suffices=nbytes <= start.free)]
    return []


def render_rollout_text(request: RolloutRequest, attempts: Sequence[RolloutAttempt]) -> str:
    """The memory of both processes side by side for each start, the refusal, and the remedies."""
    ranks = f"{request.ranks} rank(s) of the trainer, {request.strategy}"
    lines = [f"{request.model}: {SHARDINGS[request.sharding]}; {ranks}", ""]
    for attempt in attempts:
        lines += [*_describe_attempt(attempt), ""]
    loaded = attempts[0]
    if loaded.start.refusal and (remedies := find_remedies(request, loaded)):
        unit, size = choose_unit(loaded.start.total)
        lines.append("What would free how much on this device:")
        for remedy in remedies:
            suffices = "the engine starts" if remedy.suffices else "not enough"
            lines.append(f"  {remedy.frees / size:8.2f} {unit}  {suffices:17}  {remedy.setting}")
    return "\n".join(lines).rstrip() + "\n"


def render_rollout_json(request: RolloutRequest, attempts: Sequence[RolloutAttempt]) -> str:
    """A file of ledgers: the trainer's and the engine's of each start."""
    notes = [f"FSDP model {each.trainer_state}: {each.start.refusal or 'the engine started'}" for each in attempts]
    return format_memory_file(
        MemoryFile(
            origin="measured",
            command="fsdp-doctor " + " ".join(sys.argv[1:]),
            device=f"{request.ranks} x {request.device}",
            ledgers=tuple(memory for each in attempts for memory in (each.trainer, each.engine)),
            notes=tuple(notes),
        )
    )


def _describe_attempt(attempt: RolloutAttempt) -> list[str]:
    start, trainer, engine = attempt.start, attempt.trainer.device, attempt.engine.device
    assert trainer is not None
    assert engine is not None
    unit, size = choose_unit(start.total)

    def format_cells(device: DeviceMemory, names: dict[MemoryClass, str]) -> list[str]:
        rows = [(names.get(name, name), device.held[name]) for name in CLASSES if device.held.get(name)]
        rows.append(("cached by the allocator", device.reserved - device.allocated))
        rows.append(("elsewhere on the device", device.elsewhere or 0))
        # Without those that would be shown as 0.00.
        rows = [row for row in rows if row[1] >= size / 200] + [("reserved in all", device.reserved)]
        return [f"{name:24}{nbytes / size:8.2f}" for name, nbytes in rows]

    left, right = format_cells(trainer, _TRAINER_CLASSES), format_cells(engine, _ENGINE_CLASSES)
    free = f"{start.total / size:.2f} {unit}, of which {start.free / size:.2f} were free"
    lines = [f"FSDP model {attempt.trainer_state}: {free} when the engine asked for {start.requested / size:.2f}", ""]
    for row in [("trainer worker", "engine"), *itertools.zip_longest(left, right, fillvalue="")]:
        lines.append(f"  {row[0]:34}{row[1]}".rstrip())
    return [*lines, "", f"  {start.refusal or 'the engine started'}"]
