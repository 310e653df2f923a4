"""A pair of hosts on one machine: network namespaces with an address of their own each, joined by a cable."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from program import Run, Started

_PORT = 29400


@dataclass(frozen=True)
class Host:
    """name: of its namespace. device: its end of the cable."""

    name: str
    device: str
    address: str


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Skips the test where no namespaces can be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces are made by root, with ip")
    hosts = tuple(Host(f"doctor{os.getpid()}-{i}", f"fd{os.getpid() % 10**6}-{i}", f"10.213.77.{i}") for i in (1, 2))
    with contextlib.ExitStack() as stack:
        for host in hosts:
            made = subprocess.run(["ip", "netns", "add", host.name], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
            stack.callback(_ip, "netns", "delete", host.name)
        one, other = hosts
        _ip("link", "add", one.device, "netns", one.name, "type", "veth", "peer", other.device, "netns", other.name)
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            for device in ("lo", host.device):
                _ip("-n", host.name, "link", "set", device, "up")
        yield one, other


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert not done.returncode, f"ip {' '.join(arguments)}: {done.stderr}"


def torchrun_on(hosts: tuple[Host, Host], *program: str, ranks_each: int = 1) -> list[Run]:
    """torchrun's two agents, each on its host; gloo is told the device as on a real cluster.

    A rank that a signal ends says where it was.
    """
    first = hosts[0].address
    agents = [
        Started(
            *("ip", "netns", "exec", host.name, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=2", f"--nproc-per-node={ranks_each}", f"--local-addr={host.address}"),
            *(
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={first}:{_PORT}",
                f"--rdzv-conf=is_host={int(host is hosts[0])}",
            ),
            *program,
            env={"GLOO_SOCKET_IFNAME": host.device, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        )
        for host in hosts
    ]
    return [agent.wait() for agent in agents]


def script(directory: pathlib.Path, text: str) -> str:
    """The path of a file with the text."""
    file = directory / "script.py"
    file.write_text(text)
    return str(file)
