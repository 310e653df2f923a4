"""Two hosts on one machine: network namespaces with separate addresses, joined by a virtual cable."""

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
    """One of the two hosts.

    name: the name of the network namespace.
    device: the network device at this host's end of the cable.
    """

    name: str
    device: str
    address: str


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Context with two hosts. Skips the test if network namespaces cannot be made."""
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
    """Runs torchrun's two agents, one on each host. gloo is told the network device, as on a real cluster.

    A rank that is ended by a signal prints its stack.
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
    """Writes the text to a file, and returns the path."""
    file = directory / "script.py"
    file.write_text(text)
    return str(file)
