"""The plan of a job: its stages by role, and the moments at which roles and an engine share a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_doctor.ledgers.stage_ledger import StageLedger
from fsdp_doctor.plan.host import HostMoment, host_moments
from fsdp_doctor.plan.job_setup import ASLEEP_BYTES, CONTEXT_BYTES, NCCL_BYTES, JobSetup
from fsdp_doctor.plan.prediction import Predictor
from fsdp_doctor.plan.role_setup import ModelHead, RoleSetup

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
        """Of those that the job is certain to come to."""
        return max((moment for moment in self.host if moment.is_certain), key=lambda moment: moment.total)

    @property
    def host_fits(self) -> bool:
        limit = self.job.machines.host_memory
        return limit is None or self.highest_of_host.total <= limit

    @property
    def lacking(self) -> int:
        """Bytes by which the highest moments of a device and of the host go beyond their limits."""
        host = self.highest_of_host.total - (self.job.machines.host_memory or self.highest_of_host.total)
        return max(0, self.highest.total - self.highest.limit) + max(0, host)

    @property
    def fits(self) -> bool:
        return all(moment.fits for moment in self.moments) and self.host_fits


@dataclass
class Planner:
    """Plans jobs of the same models, of which each is made and counted once."""

    _predictors: dict[tuple[str, int | None, ModelHead], Predictor] = field(default_factory=dict)
    _planned: dict[tuple[str, int | None, RoleSetup], RolePlan] = field(default_factory=dict)

    def outlook(self, job: JobSetup) -> Outlook:
        """Raises UsageError for a model that there is not, or that has less than its ranks."""
        roles = tuple(self._role(job, at) for at in range(len(job.roles)))
        return Outlook(job=job, roles=roles, moments=tuple(_moments(job, roles)), host=host_moments(job, roles))

    def _role(self, job: JobSetup, at: int) -> RolePlan:
        model, setup = job.models[at], job.roles[at]
        key = (model, job.layers, setup)
        if key not in self._planned:
            kind = model, job.layers, setup.head
            if kind not in self._predictors:
                self._predictors[kind] = Predictor(model, job.layers, setup.head)
            predictor = self._predictors[kind]
            first = tuple(predictor.ledgers(setup))
            last = tuple(predictor.ledgers(setup, setup.shard_ranks - 1)) if setup.shard_ranks > 1 else first
            self._planned[key] = RolePlan(setup.role, predictor.shape.numel, first, last)
        return self._planned[key]


def _moments(job: JobSetup, roles: tuple[RolePlan, ...]) -> list[JobMoment]:
    """Each role's stages while the others are offloaded; with an engine, what it shares with them."""
    found = [moment for role in roles for moment in _of_role(job, role, roles)]
    if job.engine is None:
        return found
    return found + (_on_its_own(job, roles[0]) if job.engine.is_apart else _with_engine(job, roles))


def _of_role(job: JobSetup, role: RolePlan, roles: tuple[RolePlan, ...]) -> list[JobMoment]:
    setup = job.setup_of(role.role)
    is_beside_engine = job.engine is not None and not job.engine.is_apart
    beside = _context() | {f"{one.role}, offloaded": one.held("offloaded") for one in roles if one is not role}
    engine = _while_it_trains(job) if is_beside_engine else {}
    steps = max(role.peak(stage) for stage in ("first step", "trained", "trained again"))
    found = [
        _moment(job, f"{role.role}: built", {**beside, **engine, role.role: role.peak("built")}),
        _moment(
            job,
            f"{role.role}: {'trains' if setup.trains else 'computes log-probabilities'}",
            {**beside, **engine, role.role: steps},
        ),
    ]
    if taken_out := role.peak("extracted"):
        receiving = _receiving(job, role) if is_beside_engine and role is roles[0] else engine
        parts = {**beside, **receiving, role.role: taken_out}
        found.append(_moment(job, f"{role.role}: weights taken out ({setup.path})", parts))
    return found


def _while_it_trains(job: JobSetup) -> dict[str, int]:
    """What the engine keeps of a device while the trainer works there."""
    assert job.engine is not None
    return {"engine, asleep": CONTEXT_BYTES + ASLEEP_BYTES} if job.engine.sleeps else _share(job)


def _receiving(job: JobSetup, role: RolePlan) -> dict[str, int]:
    """The engine while it is given its weights: they and a bucket, and its cache only if it never sleeps."""
    assert job.engine is not None
    if not job.engine.sleeps:
        return {**_share(job), "engine, bucket": job.engine.bucket_bytes}
    return {
        "engine, weights": role.numel * _BF16 // job.engine.tensor_parallel,
        "engine, bucket": job.engine.bucket_bytes,
        "engine, context": CONTEXT_BYTES,
    }


def _with_engine(job: JobSetup, roles: tuple[RolePlan, ...]) -> list[JobMoment]:
    """Its start, which wants its share free, and its work; the trainer has offloaded what it offloads.

    At its start AdamW has no state yet.
    """
    share = _share(job)
    built = {
        f"{role.role}, before its first step": role.held("built")
        for role in roles
        if not job.setup_of(role.role).scenario.param_offload
    }
    offloaded = {f"{role.role}, offloaded": role.held("offloaded") for role in roles}
    return [
        _moment(job, "engine: starts", {**_context(), **built, **share}),
        _moment(job, "engine: generates", {**_context(), **offloaded, **share}),
    ]


def _on_its_own(job: JobSetup, actor: RolePlan) -> list[JobMoment]:
    """The engine of a worker that only generates: alone on its device, or beside a model that it never uses."""
    assert job.engine is not None
    loaded = actor.numel * _BF16 // job.setup_of(actor.role).shard_ranks if job.engine.loads_model else 0
    parts = {**_context(), "FSDP model, bf16, that it never uses": loaded, **_share(job)}
    return [_moment(job, "rollout worker: engine starts", parts)]


def _context() -> dict[str, int]:
    """Of one worker, however many roles it has."""
    return {"CUDA context": CONTEXT_BYTES, "NCCL": NCCL_BYTES}


def _share(job: JobSetup) -> dict[str, int]:
    assert job.engine is not None
    return {"engine, its share": int(job.machines.gpu_memory * job.engine.utilization)}


def _moment(job: JobSetup, name: str, parts: Mapping[str, int]) -> JobMoment:
    return JobMoment(name, {part: nbytes for part, nbytes in parts.items() if nbytes}, job.machines.gpu_memory)
