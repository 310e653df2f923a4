"""The memory of a node's host: what its ranks hold there, and what loading and saving take for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fsdp_doctor.ledgers.stage_ledger import StageLedger
from fsdp_doctor.plan.job_setup import JobSetup

_FP32, _BF16 = 4, 2
# Of Python, torch and its libraries, for each process: a stated constant.
PROCESS_BYTES = 3 << 30


class HeldRole(Protocol):
    """What of a role's plan is of the host."""

    @property
    def role(self) -> str: ...

    @property
    def numel(self) -> int: ...

    @property
    def first(self) -> Sequence[StageLedger]: ...


@dataclass(frozen=True)
class HostMoment:
    """What one node's host holds at once, in bytes by what it is. is_certain: whether the job comes to it as it is
    configured, and not only if a checkpoint is loaded or saved so.
    """

    name: str
    parts: Mapping[str, int]
    is_certain: bool = False

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def host_moments(job: JobSetup, roles: Sequence[HeldRole]) -> tuple[HostMoment, ...]:
    """What is offloaded, and beside it what a node needs to load a checkpoint and to save one."""
    gpus = job.machines.gpus
    base = {"processes": gpus * PROCESS_BYTES}
    offloaded = {**base, **_offloaded(roles, gpus)}
    largest = max(roles, key=lambda role: role.numel)
    saved = max((role for role in roles if role.role in job.saved_whole), key=lambda role: role.numel, default=largest)
    return (
        HostMoment("offloaded", offloaded, is_certain=True),
        HostMoment(
            "rank 0 gathers a full state dict",
            {**offloaded, "state dict": saved.numel * _FP32},
            is_certain=bool(job.saved_whole),
        ),
        HostMoment("rank 0 loads the checkpoint", {**base, "checkpoint": largest.numel * _FP32}),
        HostMoment(
            "every rank loads the checkpoint", {**base, f"{gpus} x checkpoint, bf16": gpus * largest.numel * _BF16}
        ),
        HostMoment(
            "rank 0 gathers model and optimizer", {**offloaded, "state dicts, with Adam": 3 * largest.numel * _FP32}
        ),
    )


def _offloaded(roles: Sequence[HeldRole], gpus: int) -> dict[str, int]:
    """Pinned memory as the allocator takes it, in powers of two."""
    found: dict[str, int] = {}
    for role in roles:
        host = next(ledger.host for ledger in role.first if ledger.stage == "offloaded")
        found[f"{role.role}, pinned"] = gpus * host.pinned
        found[f"{role.role}, rounding of pinned"] = gpus * (host.pinned_reserved - host.pinned)
        found[f"{role.role}, pageable"] = gpus * host.pageable
    return {name: nbytes for name, nbytes in found.items() if nbytes}
