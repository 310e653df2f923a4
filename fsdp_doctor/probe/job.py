"""What the ranks of a run have in common, said once by rank 0 over the store."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.matrix.cases import AnyCase, any_case_of, frameworks_of
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkName
from fsdp_doctor.matrix.training_size import SMALL_STEP, TrainingSize

if TYPE_CHECKING:
    import torch.distributed as dist

_KEY = "job"
_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker of the run is told, the same on all ranks.

    scratch: a directory that the run may write to; on another node than rank 0's, one of the same name.
    training: of the scenarios' steps. with_ledgers: whether the stages of the scenarios are watched.
    """

    device: RunDevice
    cases: tuple[AnyCase, ...]
    user_paths: tuple[str, ...]
    custom_model: pathlib.Path | None
    scratch: pathlib.Path
    training: TrainingSize = SMALL_STEP
    with_ledgers: bool = False

    @property
    def frameworks(self) -> tuple[FrameworkName, ...]:
        """Whose cases are among them, each once."""
        return frameworks_of(self.cases)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long and how much a worker may take.

    start: seconds for starting a generation, for building a scenario and for the doctor's own work
        on it, which grow with the model.
    stage: seconds without progress elsewhere; None follows what the stages of this run have taken.
    grace: seconds that the other ranks have to end by themselves once one rank is in trouble; None: 5, and 2 where
        they do nothing.
    host_bytes: resident memory of one worker, None for no limit.
    """

    start: float = 300.0
    stage: float | None = None
    grace: float | None = None
    host_bytes: int | None = None


def share_job(store: dist.Store, job: Job, limits: Limits) -> None:
    """Rank 0 says what the job is; see :func:`receive_job`."""
    shared = {
        "device": dataclasses.asdict(job.device),
        "cases": [[case.scenario.to_json(), case.path] for case in job.cases],
        "user_paths": job.user_paths,
        "custom_model": str(job.custom_model) if job.custom_model else None,
        "scratch": str(job.scratch),
        "training": dataclasses.asdict(job.training),
        "with_ledgers": job.with_ledgers,
        "limits": dataclasses.asdict(limits),
    }
    store.set(_KEY, json.dumps(shared))


def receive_job(store: dist.Store, check: Callable[[], None]) -> tuple[Job, Limits]:
    """What rank 0 said. Where rank 0 refuses to begin, torchrun ends the wait.

    check: called again and again meanwhile; what it raises ends the wait too.
    """
    while not store.check([_KEY]):
        check()
        time.sleep(_POLL_SECONDS)
    shared = json.loads(store.get(_KEY))
    job = Job(
        device=RunDevice(**shared["device"]),
        cases=tuple(any_case_of(scenario, path) for scenario, path in shared["cases"]),
        user_paths=tuple(shared["user_paths"]),
        custom_model=pathlib.Path(shared["custom_model"]) if shared["custom_model"] else None,
        scratch=pathlib.Path(shared["scratch"]),
        training=TrainingSize(**shared["training"]),
        with_ledgers=shared["with_ledgers"],
    )
    return job, Limits(**shared["limits"])
