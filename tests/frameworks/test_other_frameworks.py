"""Cases that work in verl, TRL, Lightning, torchtitan and SkyRL if installed; the catalogue has those that fail."""

from __future__ import annotations

import pathlib

import pytest
from program import probe

from fsdp_doctor.machine.versions import read_installed_versions
from fsdp_doctor.matrix.frameworks.framework_matrix import read_matrix
from fsdp_doctor.matrix.frameworks.framework_scenarios import parse_framework_id

_OK: dict[str, tuple[str, ...]] = {
    "verl": (
        "verl:fsdp2/param+optimizer/get_per_tensor_param",
        "verl:fsdp2/policy/merge/lora/get_per_tensor_param.merged",
        "verl:fsdp/param+optimizer/load_checkpoint.fresh",
    ),
    "trl": ("trl:fsdp2/cpu_offload/sync_weights.colocate", "trl:fsdp1-orig/none/sync_weights.server"),
    "lightning": (
        "lightning:fsdp/cpu_offload/sharded/fit.ckpt_path",
        "lightning:model-parallel/none/full/fit.ckpt_path",
    ),
    "torchtitan": ("torchtitan:cpu_offload/async/load", "torchtitan:none/pinned/load", "torchtitan:none/sync/save.hf"),
    "transformers": (
        "transformers:none/from_pretrained",
        "transformers:none/uneven/save_pretrained.consolidated",
        "transformers:none/fsdp_mixed_precision/distributed_checkpoint",
    ),
    "skyrl": ("skyrl:manual/extract_weights", "skyrl:cpu_offload/load_checkpoint.fresh"),
}


@pytest.mark.parametrize("framework", _OK)
def test_what_works_is_ok(framework: str, tmp_path: pathlib.Path) -> None:
    # A case that the matrix does not have is refused here, installed or not.
    assert {parse_framework_id(case).scenario.framework for case in _OK[framework]} == {framework}
    package = read_matrix(framework).distributions[0]
    if not read_installed_versions([package]):
        pytest.skip(f"{package} is not installed: docs/frameworks.md says how")
    words = [word for case in _OK[framework] for word in ("--case", case)]
    run = probe(tmp_path, *words, device="emulated")
    assert run.report is not None, run.stderr
    verdicts = {result.id: result.verdict for result in run.report.results}
    assert {id: verdict.kind for id, verdict in verdicts.items()} == dict.fromkeys(_OK[framework], "ok"), verdicts
    assert run.left == []
