"""A whole job: its models, the rollout engine that shares their devices, and the machines."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fsdp_doctor.plan.role_setup import RoleSetup

# Stated constants: what is on a device and no allocator of torch's counts, for each process. On an H200 with torch 2.11
# `fsdp-doctor memory rollout` shows 0.51 GiB of a process without NCCL, and 1.15 GiB of one with it.
CONTEXT_BYTES = 512 << 20
NCCL_BYTES = 640 << 20
# vLLM asleep at level 2: 1.19 GiB of Qwen3-4B in vLLM's issue 28714.
ASLEEP_BYTES = 1200 << 20


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """A rollout engine, bfloat16. bucket_bytes: in which it is given its weights.

    is_apart: whether it is on devices of its own, and not on the trainer's. sleeps: whether it gives its share back
    while the trainer works. loads_model: whether the worker that it
    belongs to there loads the FSDP model, too, which it never uses (verl issue 4229).
    """

    utilization: float
    bucket_bytes: int
    tensor_parallel: int = 1
    is_apart: bool = False
    sleeps: bool = True
    loads_model: bool = False


@dataclass(frozen=True, kw_only=True)
class Machines:
    """gpus: of each node. gpu_memory: bytes of each. host_memory: bytes of each node, None where nothing says it."""

    gpus: int
    nodes: int
    gpu_memory: int
    host_memory: int | None = None

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True, kw_only=True)
class JobSetup:
    """models: by role, a named shape or a directory. saved_whole: the roles whose checkpoint is gathered on rank 0's
    host. unread: what of the configuration is not in the plan.
    """

    framework: str
    machines: Machines
    roles: tuple[RoleSetup, ...]
    models: tuple[str, ...]
    engine: EngineSetup | None = None
    layers: int | None = None
    saved_whole: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def setup_of(self, role: str) -> RoleSetup:
        return next(setup for setup in self.roles if setup.role == role)

    def with_role(self, number: int, role: RoleSetup) -> JobSetup:
        return dataclasses.replace(self, roles=(*self.roles[:number], role, *self.roles[number + 1 :]))
