"""The library and the probe over two nodes with addresses of their own and torchrun's own agents."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from support.hosts import Host, script, torchrun_on, two_hosts

_LIBRARY = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from fsdp_doctor import RankLeft, full_tensors

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(31, 31) for _ in range(12)))
expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
for _ in range(2):
    found = dict(full_tensors(model, bucket_bytes=4096))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()) and len(found) == len(expected)
try:
    for index, _ in enumerate(full_tensors(model, bucket_bytes=4096)):
        if rank == size - 1 and index == 5:
            raise ZeroDivisionError
except ZeroDivisionError:
    print("left")
except RankLeft as error:
    print(f"rank {rank} of {size} was told: {error}")
dist.barrier()
sys.stdout.flush()
# A thread of gloo's may abort where the interpreter ends: the catalogue's gloo-thread-outlives-the-interpreter.
os._exit(0)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


def test_full_tensors_over_two_hosts(hosts: tuple[Host, Host], tmp_path: pathlib.Path) -> None:
    """A rank that leaves on one host is told of on the other, too."""
    runs = torchrun_on(hosts, script(tmp_path, _LIBRARY), ranks_each=2)
    assert [done.code for done in runs] == [0, 0], "\n".join(map(str, runs))
    printed = "".join(done.stdout for done in runs)
    assert printed.count("of 4 was told: rank 3 left after") == 3, "\n".join(map(str, runs))
    assert all(done.left == [] for done in runs)


def test_the_probe_over_two_hosts(hosts: tuple[Host, Host]) -> None:
    methods = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--method", "unshard,state_dict")
    runs = torchrun_on(hosts, "-m", "fsdp_doctor", "probe", "--device", "cpu", *methods, "--fix")
    assert [done.code for done in runs] == [0, 0], "\n".join(map(str, runs))
    lines = sorted((done.stdout.splitlines() for done in runs), key=len)
    assert lines[0] == [], "one host speaks for both"
    assert any("full_tensors\tok" in line for line in lines[1]), lines[1]
    assert all(done.left == [] for done in runs)
