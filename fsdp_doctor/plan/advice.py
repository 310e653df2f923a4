"""The one setting that brings the highest moment under the limit, and what it costs: each is tried in a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fsdp_doctor.matrix.axes import Offload
from fsdp_doctor.plan.job_setup import JobSetup
from fsdp_doctor.plan.outlook import Outlook
from fsdp_doctor.plan.role_setup import RoleSetup


@dataclass(frozen=True)
class Change:
    """A setting in the framework's words as far as there are common ones, its cost, and the job that has it."""

    setting: str
    cost: str
    job: JobSetup

    @property
    def name(self) -> str:
        """The role and the setting without its number."""
        return self.setting.rstrip("0123456789.")


@dataclass(frozen=True)
class Advice:
    """A change, the highest moment with it, which is the host's where that alone does not fit, and whether all fits."""

    change: Change
    highest: str
    nbytes: int
    fits: bool


def advice(outlook: Outlook, plan: Callable[[JobSetup], Outlook]) -> list[Advice]:
    """Of what does not fit: every change that makes it fit, the cheapest first; else those that come nearest."""
    if outlook.fits:
        return []
    tried = [(change, plan(change.job)) for change in _changes(outlook.job)]
    enough = [_advice(change, with_it) for change, with_it in tried if with_it.fits]
    return enough or [_advice(*one) for one in sorted(tried, key=lambda one: one[1].lacking)[:3]]


def _advice(change: Change, with_it: Outlook) -> Advice:
    only_host = not with_it.host_fits and with_it.highest.fits
    highest = with_it.highest_of_host if only_host else with_it.highest
    return Advice(change, f"the host: {highest.name}" if only_host else highest.name, highest.total, with_it.fits)


def _changes(job: JobSetup) -> Iterator[Change]:
    """In the order of what they cost."""
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
        for setting, cost, changed in _of_role(role, job.machines.ranks):
            yield Change(f"{role.role}: {setting}", cost, job.with_role(at, changed))


def _of_role(role: RoleSetup, ranks: int) -> Iterator[tuple[str, str, RoleSetup]]:
    if role.trains and not role.checkpointing:
        cost = "each layer's forward is computed twice"
        yield "activation checkpointing", cost, dataclasses.replace(role, checkpointing=True)
    if role.sequences > 1:
        cost = "more and smaller steps; gradients are accumulated"
        for sequences in sorted({1, role.sequences // 2}, reverse=True):
            yield f"a micro batch of {sequences}", cost, dataclasses.replace(role, sequences=sequences)
    for setting, offload in _offloads(role):
        cost = "the link to the host is in every step" if "policy" in offload else "moved twice in every step"
        scenario = role.scenario.changed(offload=offload)
        yield setting, cost, dataclasses.replace(role, scenario=scenario)
    if role.scenario.offload != "none":
        resident = role.scenario.changed(offload="none")
        yield "no offload", "more of the device, less of the host", dataclasses.replace(role, scenario=resident)
    if role.shard_ranks < ranks:
        cost = "gathers go over all ranks, between nodes too"
        scenario = role.scenario.changed(sharding="full")
        yield (
            f"fsdp_size={ranks}",
            cost,
            dataclasses.replace(role, shard_ranks=ranks, replicas=1, scenario=scenario),
        )


def _offloads(role: RoleSetup) -> list[tuple[str, Offload]]:
    """Those that offload more than the role does now."""
    scenario = role.scenario
    if scenario.policy:
        return []
    found: list[tuple[str, Offload]] = []
    if role.trains and not scenario.optimizer_offload:
        both: Offload = "param+optimizer" if scenario.param_offload else "optimizer"
        found.append(("optimizer_offload=true", both))
    if not scenario.param_offload:
        found.append(("param_offload=true", "param+optimizer" if scenario.optimizer_offload else "param"))
    if role.trains and not (scenario.param_offload and scenario.optimizer_offload):
        found.append(("param_offload=true and optimizer_offload=true", "param+optimizer"))
    found.append(("offload_policy=true", "policy"))
    return found
