"""The process that runs cases on one rank. If it crashes, hangs or dies, its supervisor notices.

The worker is forked from the supervisor, which has imported all modules but has made no CUDA context. Therefore a new
worker needs no time for imports.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsdp_doctor.errors import CannotRun, FsdpDoctorError
from fsdp_doctor.machine import devices, imports
from fsdp_doctor.machine.environment import collect_of_torch
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.probe.job import Job
from fsdp_doctor.probe.messages import Message, StartWorker
from fsdp_doctor.verdict.records import Ready, Refused

if TYPE_CHECKING:
    from fsdp_doctor.case.case_runner import CaseRunner
    from fsdp_doctor.frameworks.framework_runner import FrameworkRunner
    from fsdp_doctor.probe.workers import WorkerEnds

_IMPORTED_LATE = ("fsspec", "torch.distributed.checkpoint")
# The modules of methods, except those for peft, which only scenarios with an adapter need.
_METHODS = ("on_fsdp1", "on_fsdp2", "into_fsdp1", "into_fsdp2")


def import_what_all_workers_need() -> None:
    """Imports modules in the supervisor, before the first fork. Makes no CUDA context."""
    with imports.import_before_forks():
        import fsdp_doctor.case.case_runner  # noqa: F401, which a worker would import


def import_what_cases_need() -> None:
    """Imports modules in the supervisor, before it forks the first worker that builds a model.

    Runs once, and makes no CUDA context; raises CannotRun if an import has made one.
    """
    import_what_all_workers_need()
    with imports.import_before_forks():
        import transformers

        # torch and our own code import these modules at the first call. Imported here, no worker has to import them.
        for module in (*_IMPORTED_LATE, *(f"fsdp_doctor.case.methods.{name}" for name in _METHODS)):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        # Lazy attributes of transformers.
        for name in ("AutoConfig", "AutoModelForCausalLM", "Qwen3Config", "Qwen3ForCausalLM"):
            getattr(transformers, name, None)
        import torch

        if torch.cuda.is_initialized():
            raise CannotRun(
                "importing transformers initializes CUDA in this process, and no worker can be forked afterwards; a "
                "package that transformers imports does it: try again in an environment without quantization packages"
            )


def import_frameworks(job: Job, seconds: float) -> None:
    """Imports the job's frameworks. The supervisor calls it once, before the first fork.

    seconds: the time limit of each import.
    """
    if not job.frameworks:
        return
    from fsdp_doctor.frameworks import framework_worker

    with imports.import_before_forks():
        framework_worker.preload(job.frameworks, job.scratch, seconds)


def run(place: Place, job: Job, start: StartWorker, ends: WorkerEnds) -> None:
    """Runs a worker's whole life: joins the others, sends Ready, and does its task for each case whose number arrives.

    The worker sends Refused if it cannot run here. Any other exception ends it.
    """
    ends.write_stacks()
    warnings.filterwarnings("ignore")
    sys.path.insert(0, os.getcwd())
    if start.task == "save":
        # The worker's place differs from the place of the supervisor from which it is forked.
        os.environ |= place.variables
    # The flight recorder keeps some 360 bytes for each of the last 2000 collectives, which would hide a method's leaks.
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        os.environ.setdefault(name, "0")
    try:
        runner, unavailable = _join(place, job, start, ends.send)
    except FsdpDoctorError as error:
        ends.send(Refused(reason=str(error), exit_code=error.exit_code))
        return
    ends.send(Ready(environment=collect_of_torch(), unavailable=unavailable))
    perform: Callable[[Any], object] = runner.examine if start.task == "run" else runner.save
    with ends.channel.makefile("r") as numbers:
        for number in numbers:
            perform(job.cases[int(number)])


def _join(
    place: Place, job: Job, start: StartWorker, send: Callable[[Message], None]
) -> tuple[CaseRunner | FrameworkRunner, str]:
    """Joins the other ranks.

    Returns the runner of the cases, and the reason why no case of its framework can run, or an empty string.
    """
    import torch.distributed as dist

    devices.check_there_is_one(job.device.type, rank=place.rank, local_rank=place.local_rank)
    # This part of the ranks' store is used by no other generation of workers.
    whole_store, _, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"{start.task}/{start.generation}", whole_store)
    if start.framework is not None:
        from fsdp_doctor.frameworks import framework_worker
        from fsdp_doctor.frameworks.framework_runner import FrameworkRunner

        framework = framework_worker.start(start.framework, place, job.device, job.scratch, store)
        return FrameworkRunner(framework, report=send), framework.unavailable

    from fsdp_doctor.case import models, runtime
    from fsdp_doctor.case.case_runner import CaseRunner

    if job.custom_model is not None:
        models.check_directory(job.custom_model)
    assert start.backend is not None
    joined = runtime.start(
        store,
        place=place,
        run_device=job.device,
        backend=start.backend,
        scratch=job.scratch,
        custom_model=job.custom_model,
    )
    joined.training, joined.with_ledgers = job.training, job.with_ledgers
    return CaseRunner(joined, job.user_methods, report=send), ""
