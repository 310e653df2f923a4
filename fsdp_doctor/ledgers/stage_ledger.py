"""The classes of memory, the stages of a job, and what one rank holds at one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

MemoryClass: TypeAlias = Literal[
    "parameters",  # the shards, or what an unsharded model has
    "gradients",  # of a unit, unsharded, as backward makes them, and sharded, as they are kept until the step
    "optimizer state",  # and what the optimizer computes with while it steps
    "unsharded parameters",  # what FSDP gathers for a unit
    "buffers",
    "gathered outputs",  # what an extraction yields
    "activations",  # what a forward keeps for the backward, and what both compute with, cuBLAS's workspaces too
    "communication buffers",  # what all-gathers and reduce-scatters read and write, and an extraction works in
    "unexplained",  # counted by the allocator, and nobody's that could be named
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
class DeviceLedger:
    """One rank's device, in bytes. A class that is left out holds nothing.

    held: by class, when the stage ends; they add up to ``allocated``.
    at_peak: by class, at the moment of the stage at which the most was allocated; they add up to ``peak``.
    allocated, reserved: in tensors and in the allocator's segments when the stage ends.
    peak, peak_reserved: the most of each within the stage.
    capacity: what the device has, or what it was limited to; None where nobody says.
    elsewhere: in use on the device, and not reserved by this process: other processes, the context, the driver,
        libraries that allocate for themselves; None where nobody counts it.
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
class HostLedger:
    """One rank's tensors on the host, in bytes, when the stage ends.

    held: by class, pinned and pageable; they add up to ``pinned`` and ``pageable``.
    pinned: in tensors. pinned_reserved: taken for them, the next power of two for each as CUDA's allocator of pinned
        memory does, and what that allocator keeps of earlier ones. pageable: in tensors.
    """

    held: Bytes
    pinned: int
    pinned_reserved: int
    pageable: int


@dataclass(frozen=True, kw_only=True)
class StageLedger:
    """What one rank holds at one stage.

    job: what it is a stage of: a scenario's id, or a role of a job. path: by which something was extracted, of the
        stage "extracted" and those that follow it.
    device: None where there is no accelerator.
    """

    job: str
    stage: JobStage
    rank: int
    host: HostLedger
    device: DeviceLedger | None = None
    path: str = ""

    @property
    def name(self) -> str:
        """The stage, and by which path where something is extracted."""
        return f"{self.stage}: {self.path}" if self.stage == "extracted" else self.stage


def total(held: Bytes) -> int:
    return sum(held.values())


def with_unexplained(held: Bytes, counted: int) -> Bytes:
    """With what nobody could be named for, so that it adds up to what the allocator counts.

    It is more where tensors are made past the allocator.
    """
    rest = counted - total(held)
    return {**held, "unexplained": rest} if rest > 0 else held
