"""Ranks: this process's place among the processes that torchrun started, and starting torchrun."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_doctor.errors import CannotRun, DoctorFault, Interrupted
from fsdp_doctor.machine import imports

_RANKS_WITHOUT_ACCELERATOR = 2
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process's place in the job, as torchrun's environment variables say it."""

    rank: int
    world_size: int
    local_rank: int
    num_nodes: int

    @property
    def variables(self) -> dict[str, str]:
        """torchrun's environment variables for this place."""
        local_world_size = self.world_size // self.num_nodes
        values = (self.rank, self.world_size, self.local_rank, local_world_size)
        return dict(zip(_VARIABLES, map(str, values), strict=True))


def is_under_torchrun() -> bool:
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def is_rank_zero() -> bool:
    """True also outside of torchrun: exactly one process prints for the job."""
    return os.environ.get("RANK", "0") in ("0", "")


def read_place() -> Place:
    """This process's place. Raises CannotRun if torchrun's variables are missing or do not fit together."""
    names = (*_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise CannotRun(
            f"torchrun's environment variables are incomplete, {', '.join(missing)} not set; "
            "start with torchrun, or set none of them"
        )
    try:
        rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in _VARIABLES)
    except ValueError:
        values = ", ".join(f"{name}={os.environ[name]!r}" for name in _VARIABLES)
        raise CannotRun(f"torchrun's variables are not all numbers: {values}") from None
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise CannotRun(
            f"torchrun's variables do not fit together: rank {rank} of {world_size}, "
            f"local rank {local_rank} of {local_world_size}"
        )
    return Place(rank=rank, world_size=world_size, local_rank=local_rank, num_nodes=world_size // local_world_size)


def tell_torchrun(sentence: str) -> None:
    """Puts our sentence into torchrun's summary of a failed job, which otherwise says "no traceback".

    The file's form is torch/distributed/elastic/multiprocessing/errors/error_handler.py's.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    details = {"message": f"fsdp-doctor: {sentence}", "extraInfo": {"timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError), open(file, "w") as error_file:
        json.dump({"message": details}, error_file)


def choose_num_ranks(device: str) -> int:
    """The default number of ranks: one for each accelerator of this node, or two without accelerators."""
    with imports.freeze_imports():
        import torch

    if device in ("cpu", "emulated") or not torch.accelerator.is_available():
        return _RANKS_WITHOUT_ACCELERATOR
    return int(torch.accelerator.device_count())


def start_torchrun(arguments: Sequence[str], nproc: int) -> int:
    """Runs this program again on ``nproc`` ranks of this node, under torchrun's agent.

    Returns rank 0's exit code, which torchrun's own command would flatten to 1; the doctor's own
    fault where another rank ended first.
    """
    with imports.freeze_imports():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The ranks run the package that this process runs, from wherever it was started.
    package = str(pathlib.Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    # torchrun itself sets this, and prints five lines about it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "fsdp_doctor", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return failure.exitcode if rank == 0 and failure.exitcode > 0 else DoctorFault.exit_code
    except Exception as error:
        # A signal at the moment when torch begins to time a function of its own is behind an UnboundLocalError.
        for cause in (error, error.__context__):
            if isinstance(cause, SignalException):
                raise Interrupted(f"stopped by {cause.sigval.name}") from None
        raise
    return 0
