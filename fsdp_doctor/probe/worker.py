"""The process that runs cases on one rank. It may crash, hang, die: its supervisor looks after it.

It is forked from the supervisor, which has imported everything but has made no CUDA context; so
a fresh worker costs no import.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import pathlib
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_doctor.errors import FsdpDoctorError
from fsdp_doctor.machine.devices import RunDevice
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.verdict.records import Message, Ready, Refused, message_to_dict

if TYPE_CHECKING:
    from fsdp_doctor.case.runner import CaseRunner

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker of the run is told, the same on all ranks but for the rank itself."""

    rank: int
    world_size: int
    local_rank: int
    num_nodes: int
    device: RunDevice
    cases: tuple[Case, ...]
    user_paths: tuple[str, ...]
    custom_model: pathlib.Path | None
    scratch: pathlib.Path


def run(job: Job, generation: int, backend: str, channel: socket.socket, stacks: int) -> None:
    """The whole life of a worker: join, say Ready, run the cases whose numbers come in, until it is ended.

    What keeps it from joining through no fault of ours is Refused; any other exception ends it.

    channel: to the supervisor; messages go out as JSON lines, case numbers come in as lines.
    stacks: file descriptor that SIGUSR1 writes every thread's Python stack to.
    """
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    warnings.filterwarnings("ignore")
    sys.path.insert(0, os.getcwd())

    def send(message: Message) -> None:
        channel.sendall(json.dumps(message_to_dict(message)).encode() + b"\n")

    try:
        examiner = _join(job, generation, backend, send)
    except FsdpDoctorError as error:
        send(Refused(reason=str(error), exit_code=error.exit_code))
        return
    with channel.makefile("r") as numbers:
        for number in numbers:
            examiner.examine(job.cases[int(number)])


def _join(job: Job, generation: int, backend: str, send: Callable[[Message], None]) -> CaseRunner:
    import torch.distributed as dist

    from fsdp_doctor.case import models, runtime
    from fsdp_doctor.case.runner import CaseRunner
    from fsdp_doctor.machine import devices
    from fsdp_doctor.machine.environment import of_torch
    from fsdp_doctor.machine.launch import Place

    devices.check_there_is_one(job.device.type, rank=job.rank, local_rank=job.local_rank)
    if job.custom_model is not None:
        models.check_directory(job.custom_model)
    store, _, _ = next(dist.rendezvous("env://"))
    joined = runtime.start(
        dist.PrefixStore(f"generation/{generation}", store),
        Place(rank=job.rank, world_size=job.world_size, local_rank=job.local_rank, num_nodes=job.num_nodes),
        job.device,
        backend=backend,
        scratch=job.scratch,
        custom_model=job.custom_model,
    )
    examiner = CaseRunner(joined, job.user_paths, report=send)
    send(Ready(environment=of_torch()))
    return examiner


def die_with_parent(number: signal.Signals) -> None:
    """Has the kernel send this process a signal when the process that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def become_worker(parent: int, output: int) -> None:
    """What a fork must do before anything else. ``output``: where stdout and stderr go.

    The worker leads a session of its own, so that Ctrl-C reaches the supervisor alone and all
    that the worker starts can be ended with it. It dies with its supervisor, however that ends.
    """
    os.setsid()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
