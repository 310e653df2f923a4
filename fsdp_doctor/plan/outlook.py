"""The plan of a job: its stages by role, and the moments at which roles and an engine share a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_doctor.ledgers.stage_ledger import StageLedger
from fsdp_doctor.plan.host import HostMoment, host_moments
from fsdp_doctor.plan.job_setup import ASLEEP_BYTES, CONTEXT_BYTES, NCCL_BYTES, JobSetup
from fsdp_doctor.plan.prediction import Predictor
from fsdp_doctor.plan.role_setup import RoleSetup

_BF16 = 2


@dataclass(frozen=True)
class JobMoment:
    """What shares one device at once, in bytes by what it is. limit: what may be in use."""

    name: str
    parts: Mapping[str, int]
    limit: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


@dataclass(frozen=True)
class RolePlan:
    """One model: its parameters, and the ledgers of the first and the last rank of a shard group."""

    role: str
    numel: int
    first: tuple[StageLedger, ...]
    last: tuple[StageLedger, ...]

    def held(self, stage: str) -> int:
        return max(ledger.device.allocated for ledger in self.first if ledger.device and ledger.stage == stage)

    def peak(self, stage: str) -> int:
        return max((ledger.device.peak for ledger in self.first if ledger.device and ledger.stage == stage), default=0)


@dataclass(frozen=True, kw_only=True)
class Outlook:
    job: JobSetup
    roles: tuple[RolePlan, ...]
    moments: tuple[JobMoment, ...]
    host: tuple[HostMoment, ...]

    @property
    def highest(self) -> JobMoment:
        """That which comes nearest to its limit, or goes furthest beyond."""
        return max(self.moments, key=lambda moment: moment.total / max(1, moment.limit))

    @property
    def highest_of_host(self) -> HostMoment:
        return max(self.host, key=lambda moment: moment.total)

    @property
    def host_fits(self) -> bool:
        limit = self.job.machines.host_memory
        return limit is None or self.highest_of_host.total <= limit

    @property
    def fits(self) -> bool:
        return all(moment.fits for moment in self.moments) and self.host_fits


@dataclass
class Planner:
    """Plans jobs of the same models, of which each is made and counted once."""

    _predictors: dict[tuple[str, int | None], Predictor] = field(default_factory=dict)
    _planned: dict[tuple[str, int | None, RoleSetup], RolePlan] = field(default_factory=dict)

    def outlook(self, job: JobSetup) -> Outlook:
        """Raises UsageError for a model that there is not, or that has less than its ranks."""
        roles = tuple(self._role(job, at) for at in range(len(job.roles)))
        return Outlook(job=job, roles=roles, moments=tuple(_moments(job, roles)), host=host_moments(job, roles))

    def _role(self, job: JobSetup, at: int) -> RolePlan:
        model, setup = job.models[at], job.roles[at]
        key = (model, job.layers, setup)
        if key not in self._planned:
            if (model, job.layers) not in self._predictors:
                self._predictors[model, job.layers] = Predictor(model, job.layers)
            predictor = self._predictors[model, job.layers]
            first = tuple(predictor.ledgers(setup))
            last = tuple(predictor.ledgers(setup, setup.shard_ranks - 1)) if setup.shard_ranks > 1 else first
            self._planned[key] = RolePlan(setup.role, predictor.shape.numel, first, last)
        return self._planned[key]


def _moments(job: JobSetup, roles: tuple[RolePlan, ...]) -> list[JobMoment]:
    """Each role's stages while the others are offloaded; with an engine, what it shares with them."""
    capacity = job.machines.gpu_memory
    # Roles of one worker have one context.
    base = {"CUDA context": CONTEXT_BYTES, "NCCL": NCCL_BYTES}
    found = []
    for role in roles:
        others = {f"{one.role}, offloaded": one.held("offloaded") for one in roles if one is not role}
        asleep = {"engine, asleep": CONTEXT_BYTES + ASLEEP_BYTES} if job.engine else {}
        parts = {name: nbytes for name, nbytes in {**base, **others, **asleep}.items() if nbytes}
        found.append(JobMoment(f"{role.role}: built", {**parts, role.role: role.peak("built")}, capacity))
        steps = max(role.peak("first step"), role.peak("trained"), role.peak("trained again"))
        verb = "trains" if next(s for s in job.roles if s.role == role.role).trains else "computes log-probabilities"
        found.append(JobMoment(f"{role.role}: {verb}", {**parts, role.role: steps}, capacity))
        if taken_out := role.peak("extracted"):
            synced = job.engine is not None and role is roles[0]
            awake = _awake(job, role) if synced else parts
            extracted = {**(base if synced else {}), **awake, role.role: taken_out}
            if synced:
                extracted |= others
            name = f"{role.role}: weights taken out ({next(s for s in job.roles if s.role == role.role).path})"
            found.append(JobMoment(name, extracted, capacity))
    if job.engine is not None:
        found += _with_engine(job, roles, base)
    return found


def _awake(job: JobSetup, role: RolePlan) -> dict[str, int]:
    """The engine while it is given its weights: they and a bucket, but no cache."""
    assert job.engine is not None
    return {
        "engine, weights": role.numel * _BF16 // job.engine.tensor_parallel,
        "engine, bucket": job.engine.bucket_bytes,
        "engine, context": CONTEXT_BYTES,
    }


def _with_engine(job: JobSetup, roles: tuple[RolePlan, ...], base: Mapping[str, int]) -> list[JobMoment]:
    """Its start, which wants its share free, and its work; the trainer has offloaded what it offloads."""
    assert job.engine is not None
    capacity = job.machines.gpu_memory
    share = int(capacity * job.engine.utilization)
    trainer = {f"{role.role}, offloaded": role.held("offloaded") for role in roles}
    parts = {name: nbytes for name, nbytes in {**base, **trainer}.items() if nbytes}
    # At its start Adam has no state yet.
    built = {f"{role.role}, before its first step": _before_training(job, role) for role in roles}
    at_start = {name: nbytes for name, nbytes in {**base, **built}.items() if nbytes}
    return [
        JobMoment("engine: starts", {**at_start, "engine, its share": share}, capacity),
        JobMoment("engine: generates", {**parts, "engine, its share": share}, capacity),
    ]


def _before_training(job: JobSetup, role: RolePlan) -> int:
    setup = next(one for one in job.roles if one.role == role.role)
    return 0 if setup.scenario.param_offload else role.held("built")
