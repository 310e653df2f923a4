"""full_tensors: right in every scenario that CPU ranks can build, and it leaves the model alone."""

from __future__ import annotations

import pathlib
import weakref

import pytest
import torch
from program import TESTS, probe, torchrun
from torch import nn

from fsdp_doctor import full_tensors

_FIX = ("--strategy", "fsdp2", "--path", "full_tensors")


@pytest.mark.parametrize("nproc", [2, 3])
def test_it_is_ok_for_every_model_even_and_uneven_fresh_and_trained(tmp_path: pathlib.Path, nproc: int) -> None:
    models = "qwen3,qwen3-tied,qwen3-buffers,qwen2,qwen3-moe,qwen3.5"
    axes = ("--model", models, "--dims", "even,uneven", "--phase", "trained,fresh", "--offload", "policy")
    run = probe(tmp_path, *_FIX, *axes, "--staging", "staged", "--nproc", str(nproc))
    assert run.code == 0, run.stdout
    assert run.report is not None
    assert [result.verdict.kind for result in run.report.results] == ["ok"] * 24


def test_it_is_ok_on_hsdp_and_shard_groups_of_one(tmp_path: pathlib.Path) -> None:
    axes = ("--offload", "none,policy", "--sharding", "hsdp,size1", "--dims", "even,uneven", "--nproc", "4")
    run = probe(tmp_path, *_FIX, *axes)
    assert run.code == 0, run.stdout
    assert run.report is not None
    assert [result.verdict.kind for result in run.report.results] == ["ok"] * 16


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_it_agrees_with_the_model_before_sharding(nproc: int) -> None:
    run = torchrun(f"--nproc-per-node={nproc}", str(TESTS / "extract" / "extract_everything.py"))
    assert run.code == 0, run.stdout + run.stderr
    assert run.stdout.startswith("7 models, failures:")


def test_a_model_that_is_not_initialized_is_refused_before_any_collective() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="weight is on the meta device"):
        next(full_tensors(model))


def test_the_dtype_and_device_asked_for_are_delivered() -> None:
    (name, tensor), _ = full_tensors(nn.Linear(2, 2), device="cpu", dtype=torch.float16)
    assert (name, tensor.dtype, tensor.device.type) == ("weight", torch.float16, "cpu")


def test_the_callers_grad_mode_is_left_alone() -> None:
    entries = full_tensors(nn.Linear(2, 2))
    next(entries)
    assert torch.is_grad_enabled()


def test_one_tensor_is_held_at_a_time() -> None:
    """What was yielded and dropped is gone before the next is made."""
    entries = full_tensors(nn.Linear(2, 2))
    _, tensor = next(entries)
    held = weakref.ref(tensor)
    del tensor
    next(entries)
    assert held() is None
