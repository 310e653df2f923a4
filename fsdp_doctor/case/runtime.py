"""Place of one rank in the job: its device, process groups, meshes and memory counters."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import pathlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import assert_never

from fsdp_doctor.machine import devices
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.matrix.axes import Backend, Sharding
from fsdp_doctor.matrix.training_size import SMALL_STEP, TrainingSize
from fsdp_doctor.verdict.records import Record

# The supervisors end a worker long before this: a hang is found by the deadline of the case,
# not by a collective's own time-out.
_NEVER = datetime.timedelta(hours=24)
_CU_CTX_SCHED_BLOCKING_SYNC = 4


@dataclass(kw_only=True)
class Runtime:
    """Device, process groups and limits of one rank, for all cases that it runs.

    control: a gloo group of all ranks, apart from the groups that the model uses. The reference is joined over this
        group, and the ranks agree over it.
    scratch: a directory that this run may write to, the same on every rank.
    training: the size of the scenarios' training steps.
    with_ledgers: whether the memory of each stage is measured.
    """

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup
    scratch: pathlib.Path
    custom_model: pathlib.Path | None
    num_nodes: int = 1
    training: TrainingSize = SMALL_STEP
    with_ledgers: bool = False
    _meshes: dict[Sharding, DeviceMesh] = dataclasses.field(default_factory=dict)

    @property
    def has_accelerator(self) -> bool:
        return self.device.type != "cpu"

    def name_directory(self, record: Record) -> pathlib.Path:
        """Returns a directory for this call of the case, the same on every rank, which does not exist yet."""
        name = record.case_id.replace("/", "-")
        return self.scratch / (name if record.call == 1 else f"{name}-{record.call}")

    def make_mesh(self, sharding: Sharding) -> DeviceMesh:
        """Returns the mesh of a value of the axis ``sharding``. Every rank must call it."""
        if sharding not in self._meshes:
            self._meshes[sharding] = _make_mesh(self.device.type, sharding, self.world_size)
        return self._meshes[sharding]

    def synchronize(self) -> None:
        if self.has_accelerator:
            torch.get_device_module(self.device).synchronize()

    def check_group(self) -> bool:
        """Returns whether a collective over the model's process group gives the right result.

        Every rank must call it.
        """
        ones = torch.ones(4, device=self.device)
        dist.all_reduce(ones)
        self.synchronize()
        return bool((ones == self.world_size).all())

    def read_allocated_bytes(self) -> int | None:
        """Returns the device memory in tensors now; None if the device does not count it."""
        if not self.has_accelerator:
            return None
        self.synchronize()
        return int(torch.get_device_module(self.device).memory_allocated())

    def reset_peak(self) -> None:
        if self.has_accelerator:
            torch.get_device_module(self.device).reset_peak_memory_stats()

    def read_peak_bytes(self) -> int | None:
        if not self.has_accelerator:
            return None
        return int(torch.get_device_module(self.device).max_memory_allocated())


def _make_mesh(device_type: str, sharding: Sharding, world_size: int) -> DeviceMesh:
    # An odd number of ranks may save a checkpoint.
    by_two = (world_size // 2, 2) if world_size % 2 == 0 else (world_size, 1)
    match sharding:
        case Sharding.FULL | Sharding.EXPERTS | Sharding.REPLICATE:
            return init_device_mesh(device_type, (world_size,), mesh_dim_names=("fsdp",))
        case Sharding.HSDP:
            return init_device_mesh(device_type, by_two, mesh_dim_names=("ddp", "fsdp"))
        case Sharding.SIZE1:
            return init_device_mesh(device_type, (world_size, 1), mesh_dim_names=("ddp", "fsdp"))
        case Sharding.TP:
            return init_device_mesh(device_type, by_two, mesh_dim_names=("fsdp", Sharding.TP))
        case Sharding.EXPERTS_2D | Sharding.HIDDEN_EXPERTS:
            return init_device_mesh(device_type, by_two, mesh_dim_names=("fsdp", "ep"))
        case _:
            assert_never(sharding)


def start(
    store: dist.Store,
    *,
    place: Place,
    run_device: RunDevice,
    backend: Backend,
    scratch: pathlib.Path,
    custom_model: pathlib.Path | None,
) -> Runtime:
    """Joins the process groups of one generation of workers. Returns this rank's runtime. Every rank must call it."""
    device = choose_device(place, run_device)
    if device.type == "cuda":
        wait_for_cuda_without_spinning(place.local_rank)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    set_up_device(device, run_device)
    backends = "gloo"
    if device.type != "cpu":
        default = dist.get_default_backend_for_device(device.type)
        backends = f"cpu:gloo,{device.type}:{default}" if backend.has_cpu_collectives else default
    dist.init_process_group(
        backends,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=_NEVER,
    )
    runtime = make_for_present_group(place, device, scratch, custom_model)
    dist.all_reduce(torch.zeros(1, device=device))
    return runtime


def choose_device(place: Place, run_device: RunDevice) -> torch.device:
    return torch.device(run_device.type, place.local_rank) if run_device.type != "cpu" else torch.device("cpu")


def set_up_device(device: torch.device, run_device: RunDevice) -> None:
    """Limits the memory of the device if the run asks for this, and sets late completion on the emulated device."""
    if run_device.memory is not None:
        devices.limit_memory(device, run_device.memory)
    if device.type == "emulated":
        torch.get_device_module(device).set_late_completion(run_device.late_completion)


def make_for_present_group(
    place: Place, device: torch.device, scratch: pathlib.Path, custom_model: pathlib.Path | None = None
) -> Runtime:
    """Makes a runtime with the existing default process group and a new control group. Every rank must call it."""
    control = dist.new_group(backend="gloo", timeout=_NEVER)
    assert isinstance(control, dist.ProcessGroup)
    return Runtime(
        rank=place.rank,
        world_size=place.world_size,
        device=device,
        control=control,
        scratch=scratch,
        custom_model=custom_model,
        num_nodes=place.num_nodes,
    )


def wait_for_cuda_without_spinning(index: int) -> None:
    """Makes CUDA block a thread that waits for the device; by default the thread spins.

    A worker that waits for a collective without end can then be distinguished from a worker that computes. The
    function must be called before the CUDA context is made. It does nothing where libcuda is missing, as with ROCm.
    """
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        device = ctypes.c_int()
        driver.cuInit(0)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDevicePrimaryCtxSetFlags_v2(device, _CU_CTX_SCHED_BLOCKING_SYNC)
