"""local_shards and full_tensors in a whole probe, in scenarios of which the meshes are more than one group of ranks."""

from __future__ import annotations

import pathlib

import pytest
import torch
from program import probe

_OURS = ("--strategy", "fsdp2", "--path", "full_tensors,local_shards")

pytestmark = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="torch 2.6's FSDP2 cannot train on a CPU"
)


def test_both_are_ok_over_tensor_parallelism_replicas_and_shard_groups_of_one(tmp_path: pathlib.Path) -> None:
    axes = (
        "--offload",
        "none,policy",
        "--sharding",
        "tp,replicate,hsdp,size1",
        "--staging",
        "unstaged",
        "--nproc",
        "4",
    )
    run = probe(tmp_path, *_OURS, *axes)
    assert run.code == 0, run.stdout
    assert run.report is not None
    kinds = [result.verdict.kind for result in run.report.results]
    unsupported = 0 if _is_new_enough() else 4
    assert sorted(kinds) == ["ok"] * (16 - unsupported) + ["unsupported"] * unsupported


def test_both_are_ok_where_experts_have_a_mesh_of_their_own(tmp_path: pathlib.Path) -> None:
    axes = ("--model", "qwen3-moe", "--sharding", "experts", "--offload", "none,policy", "--dims", "even,uneven")
    run = probe(tmp_path, *_OURS, *axes, "--staging", "unstaged")
    assert run.code == 0, run.stdout
    assert run.report is not None
    assert [r.verdict.kind for r in run.report.results] == ["ok" if _is_new_enough() else "unsupported"] * 8


def _is_new_enough() -> bool:
    from fsdp_doctor.fsdp import private

    return private.has_placements_on_meshes()
