"""The job of a run, which is the same on all ranks. Rank 0 shares it over the store."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.matrix.cases import AnyCase, list_frameworks, make_any_case
from fsdp_doctor.matrix.training_size import SMALL_STEP, TrainingSize
from fsdp_doctor.probe.deadlines import Limits

if TYPE_CHECKING:
    import torch.distributed as dist

_KEY = "job"
_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Job:
    """The cases of a run and how to run them, the same on all ranks.

    scratch: a directory that the run may write to; another node than rank 0's has its own directory with this name.
    training: the size of the scenarios' training steps.
    with_ledgers: whether the memory of each stage is measured.
    """

    cases: tuple[AnyCase, ...]
    device: RunDevice
    scratch: pathlib.Path
    user_methods: tuple[str, ...] = ()
    custom_model: pathlib.Path | None = None
    training: TrainingSize = SMALL_STEP
    with_ledgers: bool = False

    @property
    def frameworks(self) -> tuple[str, ...]:
        """The frameworks of the job's cases, each listed once."""
        return list_frameworks(self.cases)


def share_job(store: dist.Store, job: Job, limits: Limits) -> None:
    """Sends the job from rank 0 to the other ranks, which call :func:`receive_job`."""
    shared = {
        "cases": [[case.scenario.to_json(), case.method] for case in job.cases],
        "device": job.device,
        "scratch": str(job.scratch),
        "user_methods": job.user_methods,
        "custom_model": str(job.custom_model) if job.custom_model else None,
        "training": job.training,
        "with_ledgers": job.with_ledgers,
        "limits": limits,
    }
    store.set(_KEY, json.dumps(msgspec.to_builtins(shared)))


def receive_job(store: dist.Store, check: Callable[[], None]) -> tuple[Job, Limits]:
    """Waits for rank 0 to share the job, and returns the job and the limits. If rank 0 fails before it does so,
    torchrun ends the wait.

    check: a function that is called repeatedly during the wait; an exception that it raises ends the wait, too.
    """
    while not store.check([_KEY]):
        check()
        time.sleep(_POLL_SECONDS)
    shared = json.loads(store.get(_KEY))
    job = Job(
        cases=tuple(make_any_case(scenario, method) for scenario, method in shared["cases"]),
        device=msgspec.convert(shared["device"], RunDevice),
        scratch=pathlib.Path(shared["scratch"]),
        user_methods=tuple(shared["user_methods"]),
        custom_model=pathlib.Path(shared["custom_model"]) if shared["custom_model"] else None,
        training=msgspec.convert(shared["training"], TrainingSize),
        with_ledgers=shared["with_ledgers"],
    )
    return job, msgspec.convert(shared["limits"], Limits)
