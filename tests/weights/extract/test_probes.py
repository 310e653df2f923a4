"""full_tensors and local_shards in whole probes, in scenarios that CPU ranks can build."""

from __future__ import annotations

import pathlib

import pytest
import torch
from program import probe

from fsdp_doctor.weights.fsdp import private

_BOTH = ("--strategy", "fsdp2", "--method", "full_tensors,local_shards")
_needs_training_on_a_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="torch 2.6's FSDP2 cannot train on a CPU"
)


def _kinds(directory: pathlib.Path, *options: str) -> list[str]:
    run = probe(directory, *options)
    assert run.code == 0, run.stdout
    assert run.report is not None
    return [result.verdict.kind for result in run.report.results]


def test_full_tensors_are_ok_for_all_models_dims_and_phases(tmp_path: pathlib.Path) -> None:
    models = "qwen3,qwen3-tied,qwen3-buffers,qwen2,qwen3-moe,qwen3.5"
    axes = ("--model", models, "--dims", "even,uneven", "--phase", "trained,fresh", "--offload", "policy")
    options = ("--strategy", "fsdp2", "--method", "full_tensors", *axes, "--staging", "staged", "--nproc", "3")
    assert _kinds(tmp_path, *options) == ["ok"] * 24


@_needs_training_on_a_cpu
def test_both_are_ok_over_tensor_parallelism_replicas_and_shard_groups_of_one(tmp_path: pathlib.Path) -> None:
    shardings = ("--sharding", "tp,replicate,hsdp,size1", "--offload", "none,policy", "--staging", "unstaged")
    kinds = _kinds(tmp_path, *_BOTH, *shardings, "--nproc", "4")
    unsupported = 0 if private.has_placements_on_meshes() else 4
    assert sorted(kinds) == ["ok"] * (16 - unsupported) + ["unsupported"] * unsupported


@_needs_training_on_a_cpu
def test_both_are_ok_where_experts_have_a_mesh_of_their_own(tmp_path: pathlib.Path) -> None:
    experts = ("--model", "qwen3-moe", "--sharding", "experts", "--offload", "none,policy", "--dims", "even,uneven")
    kinds = _kinds(tmp_path, *_BOTH, *experts, "--staging", "unstaged")
    assert kinds == ["ok" if private.has_placements_on_meshes() else "unsupported"] * 8
