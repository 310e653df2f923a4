"""Reads this process's place among the ranks that torchrun started, and starts ranks without torchrun."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_doctor.errors import CannotRun, DoctorFault
from fsdp_doctor.machine.signals import Interruption, die_with_parent

# Only a process that starts others needs this import, which takes half as long as the import of typer.
if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

_WITHOUT_ACCELERATOR = ("cpu", "emulated")
_RANKS_WITHOUT_ACCELERATOR = 2
_POLL_SECONDS = 0.1
_SECONDS_TO_END = 30.0
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_GROUP = "FSDP_DOCTOR_GROUP"
# The most groups of ranks that run side by side. With more groups, they would wait for one another's kernels.
_MOST_GROUPS = 4
# A rank waits for the other ranks, and its supervisor for the rank, about half of the time; and a group of which a rank
# has failed waits until the others have ended.
_RANKS_OF_A_PROCESSOR = 3
_DEVICE_BYTES_OF_A_GROUP = 4 << 30
# With fewer cases, the start of a group of ranks takes longer than the group saves.
_CASES_OF_A_GROUP = 50


@dataclass(frozen=True, kw_only=True)
class Place:
    """The rank of this process and the size of the job, from torchrun's environment variables."""

    rank: int
    world_size: int
    local_rank: int
    num_nodes: int

    @property
    def variables(self) -> dict[str, str]:
        """torchrun's environment variables for this rank."""
        local_world_size = self.world_size // self.num_nodes
        values = (self.rank, self.world_size, self.local_rank, local_world_size)
        return dict(zip(_VARIABLES, map(str, values), strict=True))


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """One of several groups of ranks that run at the same time.

    store_port: the port of the first group's store on this node.
    """

    number: int
    store_port: int

    @classmethod
    def read(cls) -> RankGroup | None:
        """Reads this process's group from the environment; None if there is only one group."""
        number, _, port = os.environ.get(_GROUP, "").partition(":")
        return cls(number=int(number), store_port=int(port)) if port else None

    @property
    def variables(self) -> dict[str, str]:
        return {_GROUP: f"{self.number}:{self.store_port}"}


def is_under_torchrun() -> bool:
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def is_rank_zero() -> bool:
    """Returns whether this process prints for the job: rank 0, or any process outside torchrun."""
    return os.environ.get("RANK", "0") in ("0", "")


def read_place() -> Place:
    """Reads this process's place. Raises CannotRun if torchrun's variables are missing or contradict one another."""
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
            f"torchrun's variables contradict each other: rank {rank} of {world_size}, local rank "
            f"{local_rank} of {local_world_size}"
        )
    return Place(rank=rank, world_size=world_size, local_rank=local_rank, num_nodes=world_size // local_world_size)


def tell_torchrun(sentence: str) -> None:
    """Adds ``sentence`` to torchrun's summary of a failed job, which otherwise says "no traceback".

    The format of the file is defined in torch/distributed/elastic/multiprocessing/errors/error_handler.py.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    details = {"message": f"fsdp-doctor: {sentence}", "extraInfo": {"timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError), open(file, "w") as error_file:
        json.dump({"message": details}, error_file)


def choose_num_ranks(device: str) -> int:
    """Chooses the default number of ranks: one for each accelerator of this node, or two without accelerators."""
    if device in _WITHOUT_ACCELERATOR:
        return _RANKS_WITHOUT_ACCELERATOR
    return _call_in_fork(_count_accelerators) or _RANKS_WITHOUT_ACCELERATOR


def choose_num_groups(device: str, nproc: int, num_cases: int) -> int:
    """Chooses the default number of groups of ranks, from the cases, the processors and the devices' free memory."""
    by_processors = _RANKS_OF_A_PROCESSOR * (os.cpu_count() or 1) // nproc
    wanted = min(_MOST_GROUPS, by_processors, num_cases // _CASES_OF_A_GROUP)
    if wanted < 2 or device in _WITHOUT_ACCELERATOR:
        return max(1, wanted)
    free_bytes = _call_in_fork(functools.partial(_measure_free_bytes, nproc))
    return max(1, min(wanted, free_bytes // _DEVICE_BYTES_OF_A_GROUP))


def _call_in_fork(count: Callable[[], int]) -> int:
    """Calls a function in a fork of this process, and returns the result.

    This process, which forks the ranks later, thus does not use a device's driver.
    """
    import multiprocessing
    from multiprocessing.context import ForkProcess

    ours, theirs = multiprocessing.Pipe(duplex=False)
    fork = ForkProcess(target=lambda: theirs.send(count()))
    fork.start()
    theirs.close()
    number: int = ours.recv()
    fork.join()
    return number


def _count_accelerators() -> int:
    import torch

    return int(torch.accelerator.device_count()) if torch.accelerator.is_available() else 0


def _measure_free_bytes(num_devices: int) -> int:
    """Returns the free bytes of the device with the least free memory; sys.maxsize without an accelerator."""
    import torch

    if not torch.accelerator.is_available():
        return sys.maxsize
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    if not hasattr(module, "mem_get_info"):
        return 0
    devices = range(min(num_devices, torch.accelerator.device_count()))
    return min(int(module.mem_get_info(device)[0]) for device in devices)


def start_ranks(arguments: Sequence[str], nproc: int, num_groups: int = 1) -> int:
    """Runs this program again on ``nproc`` ranks of this node, or on several groups of ``nproc`` ranks.

    Each rank is a fork of this process with torchrun's variables, so it does not repeat the imports. Returns the exit
    code of the first group's rank 0, or DoctorFault's if another rank has failed first. After SIGINT, SIGTERM or
    SIGHUP, passes the signal to the ranks and raises Interrupted. No rank outlives the call or this process.
    """
    import socket
    from multiprocessing.context import ForkProcess

    import torch.distributed as dist

    # The stores start after the forks, because their threads must not exist when this process is forked. Until then,
    # the ranks can already connect to the listening sockets.
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_groups)]
    ports = [listener.getsockname()[1] for listener in listeners]
    ranks: list[ForkProcess] = []
    interruption: Interruption | None = None
    try:
        for number, port in enumerate(ports):
            agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            if num_groups > 1:
                agent |= RankGroup(number=number, store_port=ports[0]).variables
            for rank in range(nproc):
                variables = Place(rank=rank, world_size=nproc, local_rank=rank, num_nodes=1).variables | agent
                process = ForkProcess(target=_run_as_rank, args=(os.getpid(), variables, arguments))
                with warnings.catch_warnings():
                    # Importing torch can leave a helper thread running. The thread holds no lock that a rank takes.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                ranks.append(process)
        interruption = Interruption()
        _stores = [
            dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
            for port, listener in zip(ports, listeners, strict=True)
        ]
        return _wait_for_failure(ranks, interruption)
    finally:
        _end(ranks, (interruption and interruption.received) or signal.SIGTERM)


def _run_as_rank(parent: int, variables: dict[str, str], arguments: Sequence[str]) -> None:
    # A new session, as for torchrun's ranks: Ctrl-C reaches only the launcher.
    os.setsid()
    die_with_parent(signal.SIGTERM)
    import runpy

    if os.getppid() != parent:
        os._exit(1)
    os.environ |= variables
    sys.argv[1:] = arguments
    runpy.run_module("fsdp_doctor", run_name="__main__")


def _wait_for_failure(ranks: Sequence[ForkProcess], interruption: Interruption) -> int:
    """Waits until a rank has failed or all ranks have ended. Returns the exit code of the job."""
    from multiprocessing.connection import wait

    while any(rank.exitcode is None for rank in ranks) and not any(rank.exitcode for rank in ranks):
        interruption.check()
        wait([rank.sentinel for rank in ranks if rank.exitcode is None], _POLL_SECONDS)
    if not any(rank.exitcode for rank in ranks):
        return 0
    code = ranks[0].exitcode or 0
    return code if code > 0 else DoctorFault.exit_code


def _end(ranks: Sequence[ForkProcess], number: int) -> None:
    for rank in ranks:
        if rank.exitcode is None and rank.pid is not None:
            os.kill(rank.pid, number)
    end = time.monotonic() + _SECONDS_TO_END
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
        rank.kill()
        rank.join()
