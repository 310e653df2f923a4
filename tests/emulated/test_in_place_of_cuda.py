"""A project's own tests, run with the emulated device where its modules name CUDA."""

from __future__ import annotations

import pathlib
import sys

from program import run
from support.emulated_device import emulated  # noqa: F401, without which the file is skipped

PACKAGE = """
import torch
from torch.cuda import _lazy_call  # as Megatron-FSDP imports it

CALLED = []
_lazy_call(lambda: CALLED.append(torch.cuda.is_initialized()), seed=True)
BACKEND = {"cuda": "nccl"}.get("cuda")

def make(graph: torch.cuda.CUDAGraph | None = None):  # as transformers names it
    return torch.ones(2, device=f"cuda:{torch.cuda.device_count() - 1}")
"""
TESTS = """
import subprocess, sys
import torch, project, other

def test_the_project_is_on_the_device():
    assert torch.cuda.device_count() == 3
    assert project.CALLED == [True]
    assert project.make().is_cuda and project.make().cuda(1).get_device() == 1
    assert str(project.make().device) == "emula" + "ted:2" and project.BACKEND == "nccl"

def test_so_is_a_process_that_it_starts():
    command = [sys.executable, "-c", "import project; print(project.make().device)"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.split() == ["cuda:2"]

def test_another_package_is_as_it_is_installed():
    assert other.NAME == "cu" + "da"

def test_a_failure_is_one():
    assert torch.ones(1).is_cuda
"""


def test_named_modules_find_the_device_and_the_exit_code_is_kept(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "project.py").write_text(PACKAGE)
    (tmp_path / "other.py").write_text('NAME = "cuda"\n')
    (tmp_path / "tests" / "test_project.py").write_text(TESTS)
    program = (sys.executable, "-m", "fsdp_doctor.emulated.in_place_of_cuda", "--in", "project,tests", "--devices", "3")
    done = run(*program, sys.executable, "-m", "pytest", "-q", cwd=tmp_path)
    assert done.code == 1, done.stdout + done.stderr
    assert "1 failed, 3 passed" in done.stdout
    assert "FAILED tests/test_project.py::test_a_failure_is_one" in done.stdout
