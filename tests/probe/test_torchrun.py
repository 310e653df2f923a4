"""torchrun starts the program on each rank, by its launcher file or its module, on one node or two."""

from __future__ import annotations

import pathlib
import shutil
import socket
import sys

from program import Run, Started, torchrun
from support.places import ROOT

_TWO_CASES = (
    *("--device", "cpu", "--strategy", "fsdp2", "--offload", "none,policy", "--staging", "staged"),
    *("--method", "unshard"),
)
_IDS = ["fsdp2/none/staged/unshard", "fsdp2/policy/staged/unshard"]


def _ids(run: Run) -> list[str]:
    return [line.split("\t")[0] for line in run.stdout.splitlines()]


def test_torchrun_with_the_launcher_file_of_a_checkout(tmp_path: pathlib.Path) -> None:
    """Runs from a copy of the checkout that is not installed: the file finds the package beside itself."""
    shutil.copytree(ROOT / "fsdp_doctor", tmp_path / "fsdp_doctor")
    shutil.copy(ROOT / "fsdp-doctor", tmp_path / "fsdp-doctor")
    done = torchrun("--nproc-per-node=2", "fsdp-doctor", "probe", *_TWO_CASES, env={"PYTHONPATH": ""}, cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert _ids(done) == _IDS
    assert done.left == []


def test_torchrun_with_the_module_tells_a_bad_verdict_in_its_summary() -> None:
    methods = ("unshard,summon_full_params",)
    done = torchrun("--nproc-per-node=2", "-m", "fsdp_doctor", "probe", "--strict", *_TWO_CASES[:-1], *methods)
    assert done.code == 1
    assert set(_IDS) < set(_ids(done))
    assert "fsdp-doctor: exit code 1: a verdict is not the expected one" in done.stderr


def test_two_nodes_joined_by_one_rendezvous() -> None:
    """A pair of torchrun agents on this machine stands for two nodes: only the network between them is missing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
    command = (sys.executable, "-m", "torch.distributed.run", *rendezvous, "-m", "fsdp_doctor", "probe", *_TWO_CASES)
    agents = [Started(*command), Started(*command)]
    runs = [agent.wait() for agent in agents]
    assert [done.code for done in runs] == [0, 0], "\n".join(map(str, runs))
    assert sorted(len(_ids(done)) for done in runs) == [0, 2], "one node speaks for both"
    assert all(done.left == [] for done in runs)
