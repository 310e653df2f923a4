"""The programs of examples/, as they are started there, on two CPU ranks; and that they notice what is broken."""

from __future__ import annotations

import json
import os
import pathlib
import re

import pytest
import torch
from program import Run, torchrun
from safetensors import safe_open
from support.places import ROOT

ROLLOUT = ROOT / "examples" / "rollout-sync" / "rollout_sync.py"
CHECKPOINT = ROOT / "examples" / "checkpoint" / "save_checkpoint.py"

pytestmark = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="torch 2.6's FSDP2 cannot train on a CPU"
)

_BROKEN_SYNC = """
import torch
import fsdp_doctor.extract
import rollout_sync

whole = fsdp_doctor.extract.full_tensors

def broken(*arguments, **options):
    for name, tensor in whole(*arguments, **options):
        if name != "model.norm.weight":
            yield name, tensor
        elif {rest}:
            yield name, torch.zeros_like(tensor)

if __name__ == "__main__":
    fsdp_doctor.extract.full_tensors = broken
    raise SystemExit(rollout_sync.main())
"""

_BROKEN_FILE = """
import torch
import transformers
import save_checkpoint

whole = transformers.PreTrainedModel.save_pretrained

def broken(model, directory, state_dict):
    norm = torch.zeros_like(state_dict["model.norm.weight"])
    whole(model, directory, state_dict=state_dict | {"model.norm.weight": norm})

if __name__ == "__main__":
    transformers.PreTrainedModel.save_pretrained = broken
    raise SystemExit(save_checkpoint.main())
"""


def _run(script: pathlib.Path, *arguments: str, beside: pathlib.Path = ROOT) -> Run:
    """``beside``: a program whose directory the script imports from."""
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}{os.pathsep}{beside.parent}"}
    run = torchrun("--standalone", "--nproc-per-node=2", str(script), *arguments, env=env)
    assert run.left == []
    return run


def _away(run: Run) -> float:
    (number,) = re.findall(r"own forward: (\S+)$", run.stdout, re.MULTILINE)
    return float(number)


def test_the_rollout_process_computes_what_the_trainers_weights_compute() -> None:
    run = _run(ROLLOUT, "--bucket-mib", "2")
    assert run.code == 0, run.stdout + run.stderr
    assert re.search(r"^sent 47 tensors, 8\.5 MiB, in 5 buckets, ", run.stdout, re.MULTILINE)
    assert "logits of the rollout process and of the unsharded weights: equal" in run.stdout
    assert _away(run) < 0.1


def test_a_tensor_that_is_not_sent_is_noticed(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "drops.py"
    script.write_text(_BROKEN_SYNC.format(rest=False))
    run = _run(script, beside=ROLLOUT)
    assert run.code == 1, run.stdout + run.stderr
    assert "never arrived: model.norm.weight" in run.stdout
    assert "unsharded weights: DIFFERENT" in run.stdout


def test_a_tensor_with_other_values_is_noticed(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "zeros.py"
    script.write_text(_BROKEN_SYNC.format(rest=True))
    run = _run(script, beside=ROLLOUT)
    assert run.code == 1, run.stdout + run.stderr
    assert "never arrived" not in run.stdout
    assert "unsharded weights: DIFFERENT" in run.stdout


@pytest.mark.parametrize("lora", [(), ("--lora",)], ids=["full", "lora"])
def test_the_checkpoint_holds_what_was_extracted(tmp_path: pathlib.Path, lora: tuple[str, ...]) -> None:
    if lora:
        pytest.importorskip("peft")
    run = _run(CHECKPOINT, str(tmp_path), *lora)
    assert run.code == 0, run.stdout + run.stderr
    assert f"47 tensors in {tmp_path}: equal" in run.stdout
    assert "logits of the checkpoint and of the extracted weights: equal" in run.stdout
    assert _away(run) < 0.1
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert len(names) == 46  # the tied head is not stored
    assert not any("lora" in name or "base_layer" in name for name in names)


def test_a_file_with_other_values_is_noticed(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "zeros.py"
    script.write_text(_BROKEN_FILE)
    run = _run(script, str(tmp_path / "saved"), beside=CHECKPOINT)
    assert run.code == 1, run.stdout + run.stderr
    assert "not as extracted: model.norm.weight" in run.stdout
    assert "1 DIFFERENT" in run.stdout
