"""The plan of a job: its roles, the moments at which they share a device or a host, and settings that make it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_doctor.ledgers.ledger import StageLedger
from fsdp_doctor.matrix.axes import Offload
from fsdp_doctor.plan.job_setup import (
    ASLEEP_BYTES,
    BF16,
    CONTEXT_BYTES,
    FP32,
    NCCL_BYTES,
    JobSetup,
    ModelHead,
    RoleSetup,
)
from fsdp_doctor.plan.stages import Predictor

# Of Python, torch and its libraries, for each process: a stated constant.
PROCESS_BYTES = 3 << 30


@dataclass(frozen=True)
class HostMoment:
    """Memory of one node's host at one moment. parts: bytes by name.

    is_certain: whether the configuration says that the job loads or saves a checkpoint in this way.
    """

    name: str
    parts: Mapping[str, int]
    is_certain: bool = False

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def host_moments(job: JobSetup, roles: Sequence[RolePlan]) -> tuple[HostMoment, ...]:
    """Memory of a node's host for offloaded tensors, and while a checkpoint is loaded or saved."""
    gpus = job.machines.gpus
    base = {"processes": gpus * PROCESS_BYTES}
    offloaded = {**base, **_offloaded_bytes(roles, gpus)}
    largest = max(roles, key=lambda role: role.numel)
    saved = max((role for role in roles if role.role in job.saved_whole), key=lambda role: role.numel, default=largest)
    return (
        HostMoment("offloaded", offloaded, is_certain=True),
        HostMoment(
            "rank 0 gathers a full state dict",
            {**offloaded, "state dict": saved.numel * FP32},
            is_certain=bool(job.saved_whole),
        ),
        HostMoment("rank 0 loads the checkpoint", {**base, "checkpoint": largest.numel * FP32}),
        HostMoment(
            "every rank loads the checkpoint", {**base, f"{gpus} x checkpoint, bf16": gpus * largest.numel * BF16}
        ),
        HostMoment(
            "rank 0 gathers model and optimizer", {**offloaded, "state dicts, with Adam": 3 * largest.numel * FP32}
        ),
    )


def _offloaded_bytes(roles: Sequence[RolePlan], gpus: int) -> dict[str, int]:
    """Offloaded bytes by name, pinned memory with its rounding to powers of two."""
    parts: dict[str, int] = {}
    for role in roles:
        host = next(ledger.host for ledger in role.first if ledger.stage == "offloaded")
        parts[f"{role.role}, pinned"] = gpus * host.pinned
        parts[f"{role.role}, rounding of pinned"] = gpus * (host.pinned_reserved - host.pinned)
        parts[f"{role.role}, pageable"] = gpus * host.pageable
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


@dataclass(frozen=True)
class JobMoment:
    """Memory of one device at one moment. parts: bytes by name. limit: bytes that may be in use."""

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
class JobPlan:
    """The predicted memory of a job. roles, moments: on a device. host: of a node."""

    job: JobSetup
    roles: tuple[RolePlan, ...]
    moments: tuple[JobMoment, ...]
    host: tuple[HostMoment, ...]

    @property
    def highest(self) -> JobMoment:
        """The moment that comes nearest to its limit, or goes furthest beyond."""
        return max(self.moments, key=lambda moment: moment.total / max(1, moment.limit))

    @property
    def highest_of_host(self) -> HostMoment:
        """The highest moment of the host among those that are certain."""
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
    """Plans jobs. Each model is built and traced once."""

    _predictors: dict[tuple[str, int | None, ModelHead], Predictor] = field(default_factory=dict)
    _planned: dict[tuple[str, int | None, RoleSetup], RolePlan] = field(default_factory=dict)

    def plan(self, job: JobSetup) -> JobPlan:
        """Raises UsageError for a model that does not exist, or that has fewer rows than its ranks."""
        roles = tuple(self._role(job, at) for at in range(len(job.roles)))
        return JobPlan(job=job, roles=roles, moments=tuple(_moments(job, roles)), host=host_moments(job, roles))

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
    """The stages of each role while the others are offloaded, and what an engine shares a device with."""
    moments = [moment for role in roles for moment in _role_moments(job, role, roles)]
    if job.engine is None:
        return moments
    if job.engine.is_apart:
        return [*moments, _separate_engine_moment(job, roles[0])]
    return [*moments, *_engine_moments(job, roles)]


def _role_moments(job: JobSetup, role: RolePlan, roles: tuple[RolePlan, ...]) -> list[JobMoment]:
    setup = job.setup_of(role.role)
    is_beside_engine = job.engine is not None and not job.engine.is_apart
    beside = _context() | {f"{other.role}, offloaded": other.held("offloaded") for other in roles if other is not role}
    engine = _engine_beside_trainer(job) if is_beside_engine else {}
    steps = max(role.peak(stage) for stage in ("first step", "trained", "trained again"))
    moments = [
        _moment(job, f"{role.role}: built", {**beside, **engine, role.role: role.peak("built")}),
        _moment(
            job,
            f"{role.role}: {'trains' if setup.trains else 'computes log-probabilities'}",
            {**beside, **engine, role.role: steps},
        ),
    ]
    if extracted := role.peak("extracted"):
        receiving = _engine_receiving_weights(job, role) if is_beside_engine and role is roles[0] else engine
        parts = {**beside, **receiving, role.role: extracted}
        moments.append(_moment(job, f"{role.role}: weights taken out ({setup.path})", parts))
    return moments


def _engine_beside_trainer(job: JobSetup) -> dict[str, int]:
    """The engine's memory while the trainer works on its device."""
    assert job.engine is not None
    return {"engine, asleep": CONTEXT_BYTES + ASLEEP_BYTES} if job.engine.sleeps else _engine_share(job)


def _engine_receiving_weights(job: JobSetup, role: RolePlan) -> dict[str, int]:
    """The engine's memory while it receives weights: they and a bucket, and its cache only if it never sleeps."""
    assert job.engine is not None
    if not job.engine.sleeps:
        return {**_engine_share(job), "engine, bucket": job.engine.bucket_bytes}
    return {
        "engine, weights": role.numel * BF16 // job.engine.tensor_parallel,
        "engine, bucket": job.engine.bucket_bytes,
        "engine, context": CONTEXT_BYTES,
    }


def _engine_moments(job: JobSetup, roles: tuple[RolePlan, ...]) -> list[JobMoment]:
    """The engine's start, which needs its share free, and its generation, beside a trainer that is offloaded.

    At the start AdamW has no state yet.
    """
    share = _engine_share(job)
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


def _separate_engine_moment(job: JobSetup, actor: RolePlan) -> JobMoment:
    """The start of an engine on devices of its own, perhaps beside an FSDP model that it never uses."""
    assert job.engine is not None
    loaded = actor.numel * BF16 // job.setup_of(actor.role).shard_ranks if job.engine.loads_model else 0
    parts = {**_context(), "FSDP model, bf16, that it never uses": loaded, **_engine_share(job)}
    return _moment(job, "rollout worker: engine starts", parts)


def _context() -> dict[str, int]:
    """Memory of one worker outside torch's allocator, however many roles it has."""
    return {"CUDA context": CONTEXT_BYTES, "NCCL": NCCL_BYTES}


def _engine_share(job: JobSetup) -> dict[str, int]:
    assert job.engine is not None
    return {"engine, its share": int(job.machines.gpu_memory * job.engine.utilization)}


def _moment(job: JobSetup, name: str, parts: Mapping[str, int]) -> JobMoment:
    return JobMoment(name, {part: nbytes for part, nbytes in parts.items() if nbytes}, job.machines.gpu_memory)


@dataclass(frozen=True)
class Change:
    """A change of one setting, in verl's words where frameworks differ; its cost, and the job with it."""

    setting: str
    cost: str
    job: JobSetup

    @property
    def name(self) -> str:
        """The role and the setting, without its number."""
        return self.setting.rstrip("0123456789.")


@dataclass(frozen=True)
class Advice:
    """A change of one setting, and the plan with it.

    highest, nbytes: the highest moment, which is the host's where that alone does not fit. lacking: bytes.
    """

    change: Change
    highest: str
    nbytes: int
    fits: bool
    lacking: int


def advise(plan: JobPlan, make_plan: Callable[[JobSetup], JobPlan]) -> list[Advice]:
    """Tries each change of one setting of a job that does not fit.

    Returns those that make it fit, the cheapest first; or the three that come nearest.
    """
    if plan.fits:
        return []
    tried = [_as_advice(change, make_plan(change.job)) for change in _changes(plan.job)]
    return [each for each in tried if each.fits] or sorted(tried, key=lambda each: each.lacking)[:3]


def _as_advice(change: Change, plan: JobPlan) -> Advice:
    is_of_host = not plan.host_fits and plan.highest.fits
    highest = plan.highest_of_host if is_of_host else plan.highest
    name = f"the host: {highest.name}" if is_of_host else highest.name
    return Advice(change, name, highest.total, plan.fits, plan.lacking)


def _changes(job: JobSetup) -> Iterator[Change]:
    """All changes, in the order of their cost."""
    if job.engine is not None:
        engine = job.engine
        for percent in range(round(engine.utilization * 100) - 5, 5, -5):
            smaller = dataclasses.replace(engine, utilization=percent / 100)
            cost = "a smaller cache: fewer sequences are generated at once"
            yield Change(f"gpu_memory_utilization={percent / 100:g}", cost, dataclasses.replace(job, engine=smaller))
        if not engine.sleeps and not engine.is_apart:
            asleep = dataclasses.replace(engine, sleeps=True)
            cost = "the engine's cache is made anew for each generation"
            yield Change("free_cache_engine=true", cost, dataclasses.replace(job, engine=asleep))
        if engine.loads_model:
            alone = dataclasses.replace(engine, loads_model=False)
            setting = "no FSDP model in a worker that only generates (verl since v0.8)"
            yield Change(setting, "none", dataclasses.replace(job, engine=alone))
        if engine.bucket_bytes > 256 << 20:
            smaller = dataclasses.replace(engine, bucket_bytes=256 << 20)
            cost = "more and smaller transfers to the engine"
            yield Change("a bucket of 256 MiB", cost, dataclasses.replace(job, engine=smaller))
    for at, role in enumerate(job.roles):
        for setting, cost, changed in _role_changes(role, job.machines.ranks):
            yield Change(f"{role.role}: {setting}", cost, job.with_role(at, changed))


def _role_changes(role: RoleSetup, ranks: int) -> Iterator[tuple[str, str, RoleSetup]]:
    if role.trains and not role.checkpointing:
        cost = "each layer's forward is computed twice"
        yield "activation checkpointing", cost, dataclasses.replace(role, checkpointing=True)
    if role.sequences > 1:
        cost = "more and smaller steps; gradients are accumulated"
        for sequences in sorted({1, role.sequences // 2}, reverse=True):
            yield f"a micro batch of {sequences}", cost, dataclasses.replace(role, sequences=sequences)
    for setting, offload in _more_offloads(role):
        cost = "the link to the host is in every step" if offload.policy else "moved twice in every step"
        scenario = role.scenario.changed(offload=offload)
        yield setting, cost, dataclasses.replace(role, scenario=scenario)
    if role.scenario.offload:
        resident = role.scenario.changed(offload=Offload())
        yield "no offload", "more of the device, less of the host", dataclasses.replace(role, scenario=resident)
    if role.shard_ranks < ranks:
        cost = "gathers go over all ranks, between nodes too"
        scenario = role.scenario.changed(sharding="full")
        yield (
            f"fsdp_size={ranks}",
            cost,
            dataclasses.replace(role, shard_ranks=ranks, replicas=1, scenario=scenario),
        )


def _more_offloads(role: RoleSetup) -> list[tuple[str, Offload]]:
    """Settings that offload more than the role does now."""
    scenario = role.scenario
    if scenario.policy:
        return []
    offloads: list[tuple[str, Offload]] = []
    if role.trains and not scenario.optimizer_offload:
        offloads.append(("optimizer_offload=true", Offload.of(param=scenario.param_offload, optimizer=True)))
    if not scenario.param_offload:
        offloads.append(("param_offload=true", Offload.of(param=True, optimizer=scenario.optimizer_offload)))
    if role.trains and not (scenario.param_offload and scenario.optimizer_offload):
        offloads.append(("param_offload=true and optimizer_offload=true", Offload.of(param=True, optimizer=True)))
    offloads.append(("offload_policy=true", Offload.of(policy=True)))
    return offloads
