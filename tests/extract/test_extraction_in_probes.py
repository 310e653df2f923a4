"""full_tensors in a whole probe, in every scenario that CPU ranks can build."""

from __future__ import annotations

import pathlib

import pytest
from program import probe

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
