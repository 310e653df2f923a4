"""Records one rank's memory at one stage of a job, by class of memory.

Also converts the records to JSON and back, and rounds sizes as CUDA's allocators do.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import msgspec

from fsdp_doctor import __version__
from fsdp_doctor.errors import UsageError

MemoryClass: TypeAlias = Literal[
    "parameters",  # the shards, or what an unsharded model has
    "gradients",  # of a unit, unsharded, as backward makes them, and sharded, as they are kept until the step
    "optimizer state",  # and what the optimizer computes with while it steps
    "unsharded parameters",  # what FSDP gathers for a unit
    "buffers",
    "gathered outputs",  # what an extraction yields
    "activations",  # what a forward keeps for the backward, and what both compute with, cuBLAS's workspaces too
    "communication buffers",  # what all-gathers and reduce-scatters read and write, and an extraction works in
    "unexplained",  # counted by the allocator, of no known class
]
JobStage: TypeAlias = Literal[
    "built",  # sharded, with an optimizer that has no state
    "first step",
    "trained",  # after a second step, the first that has optimizer state from its beginning
    "offloaded",
    "staged",
    "extracted",
    "offloaded again",
    "loaded",
    "trained again",
]
CLASSES: tuple[MemoryClass, ...] = get_args(MemoryClass)
Bytes: TypeAlias = dict[MemoryClass, int]


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of one rank's device, in bytes. A class that is left out holds nothing.

    held: bytes by class when the stage ends; their sum is ``allocated``.
    at_peak: bytes by class at the moment of the stage's highest allocation; their sum is ``peak``.
    allocated: bytes in tensors when the stage ends.
    reserved: bytes in the allocator's segments when the stage ends.
    peak, peak_reserved: the highest values of ``allocated`` and ``reserved`` within the stage.
    capacity: the device's memory, or the process's limit if one is set; None if unknown.
    elsewhere: memory in use that this process's allocator has not reserved: other processes, the context, the driver,
        libraries with their own allocations; None if it was not counted.
    """

    held: Bytes
    at_peak: Bytes
    allocated: int
    peak: int
    reserved: int
    peak_reserved: int
    capacity: int | None = None
    elsewhere: int | None = None


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The memory of one rank's tensors on the host, in bytes, when the stage ends.

    held: bytes by class, pinned and pageable together; their sum is ``pinned + pageable``.
    pinned: bytes of tensors in pinned memory.
    pinned_reserved: bytes that CUDA's allocator of pinned memory holds: the next power of two for each tensor, and
        memory that the allocator keeps from freed tensors.
    pageable: bytes of tensors in pageable memory.
    """

    held: Bytes
    pinned: int
    pinned_reserved: int
    pageable: int

    @property
    def taken(self) -> int:
        """Bytes of host memory in use, including the rounding of pinned memory."""
        return self.pinned_reserved + self.pageable


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The memory of one rank at one stage.

    job: the name of the job: the id of a scenario, the role of a model in a training job, or any label.
    method: the name of the extraction method, such as ``full_tensors``, for the stage "extracted" and the stages after
        it.
    device: the device's memory; None without an accelerator.
    """

    job: str
    stage: JobStage
    rank: int
    host: HostMemory
    device: DeviceMemory | None = None
    method: str = ""

    @property
    def peak(self) -> int:
        """Highest number of bytes allocated on the device; 0 without an accelerator."""
        return self.device.peak if self.device is not None else 0

    @property
    def name(self) -> str:
        """Name of the stage, with the method of the extraction if there is one."""
        return f"{self.stage}: {self.method}" if self.stage == "extracted" else self.stage


def sum_classes(by_class: Bytes) -> int:
    return sum(by_class.values())


def add_unexplained(by_class: Bytes, counted: int) -> Bytes:
    """Adds the class "unexplained", so that the classes add up to the allocator's count.

    If some tensors were allocated without the allocator, the classes add up to more than its count.
    """
    rest = counted - sum_classes(by_class)
    return {**by_class, "unexplained": rest} if rest > 0 else by_class


# The caching allocator gives tensors multiples of it; so does the emulated device's.
_BLOCK = 512


def round_up(nbytes: int) -> int:
    """Computes the bytes that CUDA's caching allocator uses on the device for a tensor."""
    return -(-nbytes // _BLOCK) * _BLOCK


def sum_rounded(sizes: Iterable[int]) -> int:
    """Computes the bytes that CUDA's caching allocator uses on the device for tensors of these sizes."""
    return sum(map(round_up, sizes))


def round_to_power_of_two(nbytes: int) -> int:
    """Computes the bytes of pinned memory that CUDA's host allocator uses for a tensor."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


SCHEMA = "fsdp-doctor/ledgers"
SCHEMA_VERSION = 1
Origin: TypeAlias = Literal["measured", "predicted"]


@dataclass(frozen=True, kw_only=True)
class MemoryFile:
    """The ledgers of one run or one plan.

    command: the command that made the ledgers.
    device: the number of ranks and the kind of device, such as ``2 x NVIDIA H200``.
    packages: the version of each package.
    notes: sentences that a reader must know.
    estimates: the bytes that other estimators predict, by job and by the estimator's name.
    """

    origin: Origin
    command: str
    device: str
    ledgers: tuple[StageMemory, ...]
    packages: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    estimates: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def format_memory_file(file: MemoryFile) -> str:
    head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "version": __version__}
    return json.dumps(head | dataclasses.asdict(file), indent=1) + "\n"


def read_memory_file(text: str) -> MemoryFile:
    """Reads the text of a memory file. Raises UsageError for any other text."""
    try:
        data = json.loads(text)
        if (data["schema"], data["schema_version"]) != (SCHEMA, SCHEMA_VERSION):
            raise ValueError(f"its schema is {data['schema']} {data['schema_version']}")
        return msgspec.convert(data, MemoryFile)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "not a file that `fsdp-doctor memory measure --json` or `memory plan --json` wrote: "
            f"{type(error).__name__}: {error}"
        ) from None
