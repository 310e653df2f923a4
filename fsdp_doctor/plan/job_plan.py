"""Plans the memory of a job: adds up its roles on each device and host, and tries settings that make the job fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fsdp_doctor.examination.memory_records import JobStage, StageMemory
from fsdp_doctor.matrix.axes import Offload, Sharding
from fsdp_doctor.plan.job import BF16, FP32, JobSetup, ModelHead, RoleSetup
from fsdp_doctor.plan.stages import Predictor

# Assumed device memory of each process that torch's allocator does not count. examples/verl-4229 measured 0.51 GiB for
# a process without NCCL, and 1.15 GiB for a process with NCCL, on an H200 with torch 2.11.
CONTEXT_BYTES = 512 << 20
NCCL_BYTES = 640 << 20
# vLLM asleep at level 2: 1.19 GiB of Qwen3-4B in vLLM's issue 28714.
ASLEEP_BYTES = 1200 << 20
# Of Python, torch and its libraries on the host, for each process.
PROCESS_BYTES = 3 << 30


@dataclass(frozen=True, kw_only=True)
class JobMoment:
    """The memory of one device, or of one node's host, at one moment of the job.

    parts: the bytes in use, by name.
    limit: the bytes that may be in use; None if unknown.
    is_certain: whether the job is known to reach this moment; for some ways of saving and loading it is not known.
    """

    name: str
    parts: Mapping[str, int]
    limit: int | None
    is_certain: bool = True

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def lacking(self) -> int:
        """Number of bytes by which the memory exceeds the limit; 0 if it fits."""
        return max(0, self.total - self.limit) if self.limit is not None else 0

    @property
    def fits(self) -> bool:
        return not self.lacking


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """The predicted memory of one model.

    numel: the number of the model's parameters.
    first: the memory ledgers of the first rank in a shard group, one for each stage.
    last: the memory ledgers of the last rank in a shard group.
    """

    setup: RoleSetup
    numel: int
    first: tuple[StageMemory, ...]
    last: tuple[StageMemory, ...]

    def find_stage(self, stage: JobStage) -> StageMemory:
        return next(memory for memory in self.first if memory.stage == stage)

    def count_bytes(self, stage: JobStage) -> int:
        device = self.find_stage(stage).device
        return device.allocated if device else 0

    def find_peak(self, *stages: JobStage) -> int:
        """Finds the highest device peak among the given stages; 0 if the role has none of them."""
        return max((memory.peak for memory in self.first if memory.stage in stages), default=0)


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """The predicted memory of a job.

    moments: the moments on a device.
    host: the moments on a node's host.
    """

    job: JobSetup
    roles: tuple[RolePlan, ...]
    moments: tuple[JobMoment, ...]
    host: tuple[JobMoment, ...]

    @property
    def highest(self) -> JobMoment:
        """The moment with the highest device memory."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def highest_of_host(self) -> JobMoment:
        """The moment with the highest host memory among the moments that are certain."""
        return max((moment for moment in self.host if moment.is_certain), key=lambda moment: moment.total)

    @property
    def lacking(self) -> int:
        """Sum of the bytes by which the highest moments exceed the limits of the device and of the host."""
        return self.highest.lacking + self.highest_of_host.lacking

    @property
    def fits(self) -> bool:
        return not self.lacking


class Planner:
    """Plans jobs, and caches its results: the memory of each role setup is predicted only once."""

    def __init__(self) -> None:
        self._predictors: dict[tuple[str, int | None, ModelHead], Predictor] = {}
        self._roles: dict[RoleSetup, RolePlan] = {}

    def plan(self, job: JobSetup) -> JobPlan:
        """Predicts the memory of a job.

        Raises UsageError for a model that does not exist, or if no parameter has as many rows as a shard group has
        ranks.
        """
        roles = tuple(map(self._plan_role, job.roles))
        return JobPlan(
            job=job, roles=roles, moments=tuple(_list_device_moments(job, roles)), host=_list_host_moments(job, roles)
        )

    def advise(self, plan: JobPlan) -> list[Advice]:
        """Tries each change of a single setting for a job that does not fit; returns no changes for a job that fits.

        Returns the changes that make the job fit, the cheapest first. If there are none, returns the three changes
        that lack the fewest bytes.
        """
        if plan.fits:
            return []
        tried = [Advice(setting=name, cost=cost, plan=self.plan(job)) for name, cost, job in _list_changes(plan.job)]
        return [each for each in tried if each.plan.fits] or sorted(tried, key=lambda each: each.plan.lacking)[:3]

    def _plan_role(self, setup: RoleSetup) -> RolePlan:
        if setup not in self._roles:
            model = setup.model, setup.layers, setup.head
            if model not in self._predictors:
                self._predictors[model] = Predictor(*model)
            predictor = self._predictors[model]
            first = tuple(predictor.predict_stages(setup))
            last = tuple(predictor.predict_stages(setup, setup.shard_ranks - 1)) if setup.shard_ranks > 1 else first
            self._roles[setup] = RolePlan(setup=setup, numel=predictor.shape.numel, first=first, last=last)
        return self._roles[setup]


def _list_host_moments(job: JobSetup, roles: tuple[RolePlan, ...]) -> tuple[JobMoment, ...]:
    """Lists the moments of a node's host memory: with offloaded tensors, and while a checkpoint is loaded or saved."""
    gpus, limit = job.machines.gpus, job.machines.host_memory
    processes = {"processes": gpus * PROCESS_BYTES}
    offloaded = {**processes, **_count_offloaded_bytes(roles, gpus)}
    largest = max(role.numel for role in roles)
    saved = [role.numel for role in roles if role.setup.saved_whole]

    def make_moment(name: str, parts: Mapping[str, int], is_certain: bool = False) -> JobMoment:
        return JobMoment(name=name, parts=parts, limit=limit, is_certain=is_certain)

    gathered = {**offloaded, "state dict": max(saved, default=largest) * FP32}
    all_gathered = {**offloaded, "state dicts, with Adam": 3 * largest * FP32}
    return (
        make_moment("offloaded", offloaded, is_certain=True),
        make_moment("rank 0 gathers a full state dict", gathered, is_certain=bool(saved)),
        make_moment("rank 0 loads the checkpoint", {**processes, "checkpoint": largest * FP32}),
        make_moment(
            "every rank loads the checkpoint", {**processes, f"{gpus} x checkpoint, bf16": gpus * largest * BF16}
        ),
        make_moment("rank 0 gathers model and optimizer", all_gathered),
    )


def _count_offloaded_bytes(roles: tuple[RolePlan, ...], gpus: int) -> dict[str, int]:
    """Counts the offloaded bytes by name; the rounding of pinned memory to powers of two has its own name."""
    parts: dict[str, int] = {}
    for role in roles:
        host, name = role.find_stage("offloaded").host, role.setup.role
        parts[f"{name}, pinned"] = gpus * host.pinned
        parts[f"{name}, rounding of pinned"] = gpus * (host.pinned_reserved - host.pinned)
        parts[f"{name}, pageable"] = gpus * host.pageable
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def _list_device_moments(job: JobSetup, roles: tuple[RolePlan, ...]) -> Iterator[JobMoment]:
    """Lists the moments of a device's memory.

    The moments are the stages of each role while the other roles are offloaded, and the start and the work of an
    engine.
    """
    engine = job.engine
    # Memory of one worker outside torch's allocator, however many roles it has.
    worker = {"CUDA context": CONTEXT_BYTES, "NCCL": NCCL_BYTES}
    share = {"engine, its share": int(job.machines.gpu_memory * engine.utilization)} if engine else {}
    offloaded = {role.setup.role: {f"{role.setup.role}, offloaded": role.count_bytes("offloaded")} for role in roles}

    def make_moment(name: str, *parts: Mapping[str, int]) -> JobMoment:
        joined = {part: nbytes for each in parts for part, nbytes in each.items() if nbytes}
        return JobMoment(name=name, parts=joined, limit=job.machines.gpu_memory)

    beside: Mapping[str, int] = {}
    receiving: Mapping[str, int] = {}
    if engine and not engine.is_apart:
        # While the trainer works, and while the engine is given weights: only one that never sleeps has its cache then.
        beside = {"engine, asleep": CONTEXT_BYTES + ASLEEP_BYTES} if engine.sleeps else share
        weights = {"engine, weights": roles[0].numel * BF16 // engine.tensor_parallel}
        bucket = {"engine, bucket": engine.bucket_bytes}
        receiving = {**weights, **bucket, "engine, context": CONTEXT_BYTES} if engine.sleeps else {**share, **bucket}
    for role in roles:
        name = role.setup.role
        others = [worker, *(parts for other, parts in offloaded.items() if other != name)]
        work = "trains" if role.setup.trains else "computes log-probabilities"
        yield make_moment(f"{name}: built", *others, beside, {name: role.find_peak("built")})
        yield make_moment(
            f"{name}: {work}", *others, beside, {name: role.find_peak("first step", "trained", "trained again")}
        )
        if extracted := role.find_peak("extracted"):
            engine_part = receiving if receiving and role is roles[0] else beside
            yield make_moment(
                f"{name}: weights taken out ({role.setup.method})", *others, engine_part, {name: extracted}
            )
    if engine and engine.is_apart:
        loaded = roles[0].numel * BF16 // roles[0].setup.shard_ranks if engine.loads_model else 0
        yield make_moment(
            "rollout worker: engine starts", worker, {"FSDP model, bf16, that it never uses": loaded}, share
        )
    elif engine:
        # The start needs the engine's share free, before AdamW has any state.
        built = {
            f"{role.setup.role}, before its first step": role.count_bytes("built")
            for role in roles
            if not role.setup.scenario.param_offload
        }
        yield make_moment("engine: starts", worker, built, share)
        yield make_moment("engine: generates", worker, *offloaded.values(), share)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change of one setting, its cost, and the plan with the change. Settings have verl's names."""

    setting: str
    cost: str
    plan: JobPlan

    @property
    def name(self) -> str:
        """Role and setting, without the number at the end of the setting."""
        return self.setting.rstrip("0123456789.")

    @property
    def highest(self) -> tuple[str, int]:
        """Name and bytes of the highest moment: the host's if only the host does not fit, otherwise the device's."""
        host, device = self.plan.highest_of_host, self.plan.highest
        return (f"the host: {host.name}", host.total) if device.fits and not host.fits else (device.name, device.total)


def _list_changes(job: JobSetup) -> Iterator[tuple[str, str, JobSetup]]:
    """Lists all changes of a single setting as (setting, cost, changed job), the cheapest first."""
    if (engine := job.engine) is not None:
        for percent in range(round(engine.utilization * 100) - 5, 5, -5):
            cost = "a smaller cache: fewer sequences are generated at once"
            smaller = replace(job, engine=replace(engine, utilization=percent / 100))
            yield f"gpu_memory_utilization={percent / 100:g}", cost, smaller
        if not engine.sleeps and not engine.is_apart:
            cost = "the engine's cache is created again for each generation"
            yield "free_cache_engine=true", cost, replace(job, engine=replace(engine, sleeps=True))
        if engine.loads_model:
            setting = "no FSDP model in a worker that only generates (verl since v0.8)"
            yield setting, "none", replace(job, engine=replace(engine, loads_model=False))
        if engine.bucket_bytes > 256 << 20:
            cost = "more and smaller transfers to the engine"
            yield "a bucket of 256 MiB", cost, replace(job, engine=replace(engine, bucket_bytes=256 << 20))
    for at, role in enumerate(job.roles):
        for setting, cost, changed in _list_role_changes(role, job.machines.ranks):
            yield f"{role.role}: {setting}", cost, job.replace_role(at, changed)


def _list_role_changes(role: RoleSetup, ranks: int) -> Iterator[tuple[str, str, RoleSetup]]:
    scenario = role.scenario
    if role.trains and not role.checkpointing:
        yield "activation checkpointing", "each layer's forward is computed twice", replace(role, checkpointing=True)
    if role.sequences > 1:
        cost = "more and smaller steps; gradients are accumulated"
        for sequences in sorted({1, role.sequences // 2}, reverse=True):
            yield f"a micro batch of {sequences}", cost, replace(role, sequences=sequences)
    for setting, offload in _list_more_offloads(role):
        cost = "every step transfers over the link to the host" if offload.policy else "moved twice in every step"
        yield setting, cost, replace(role, scenario=scenario.change(offload=offload))
    if scenario.offload:
        cost = "more of the device, less of the host"
        yield "no offload", cost, replace(role, scenario=scenario.change(offload=Offload()))
    if role.shard_ranks < ranks:
        cost = "gathers include all ranks, also between nodes"
        whole = scenario.change(sharding=Sharding.FULL)
        yield f"fsdp_size={ranks}", cost, replace(role, shard_ranks=ranks, replicas=1, scenario=whole)


def _list_more_offloads(role: RoleSetup) -> list[tuple[str, Offload]]:
    """Lists settings that offload more than the present setting of the role, each with the resulting offload."""
    scenario = role.scenario
    if scenario.policy:
        return []
    offloads: list[tuple[str, Offload]] = []
    if role.trains and not scenario.optimizer_offload:
        offloads.append(("optimizer_offload=true", Offload.from_flags(param=scenario.param_offload, optimizer=True)))
    if not scenario.param_offload:
        offloads.append(("param_offload=true", Offload.from_flags(param=True, optimizer=scenario.optimizer_offload)))
    if role.trains and not (scenario.param_offload and scenario.optimizer_offload):
        offloads.append(
            ("param_offload=true and optimizer_offload=true", Offload.from_flags(param=True, optimizer=True))
        )
    offloads.append(("offload_policy=true", Offload.from_flags(policy=True)))
    return offloads
