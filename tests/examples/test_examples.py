"""The programs of examples/ on two CPU ranks, each once as it is started there; and that they notice what is broken."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
import torch
from program import torchrun
from safetensors import safe_open
from support.forked import run_script
from support.places import ROOT

ROLLOUT = ROOT / "examples" / "rollout-sync" / "rollout_sync.py"
CHECKPOINT = ROOT / "examples" / "checkpoint" / "save_checkpoint.py"

pytestmark = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="torch 2.6's FSDP2 cannot train on a CPU"
)

_ON_THE_CPU = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.append({directory!r})
"""

_BROKEN_SYNC = """
import torch
import fsdp_doctor.weights.extract
import rollout_sync

whole = fsdp_doctor.weights.extract.full_tensors

def broken(*arguments, **options):
    for name, tensor in whole(*arguments, **options):
        if name != "model.norm.weight":
            yield name, tensor
        elif {rest}:
            yield name, torch.zeros_like(tensor)

if __name__ == "__main__":
    fsdp_doctor.weights.extract.full_tensors = broken
    raise SystemExit(rollout_sync.main())
"""

# What the receiver does with the tensors of these names in the second sync, instead of copying them.
_PLANTED = """
import torch
import rollout_sync

syncs = {}

def load(targets, name, tensor):
    syncs[name] = syncs.get(name, 0) + 1
    if syncs[name] == 2:
        name, tensor = planted(targets, name, tensor)
    if name is not None:
        targets[name].copy_(tensor)

def planted(targets, name, tensor):
    match name:
        case "model.layers.0.self_attn.q_proj.weight":  # stale
            return None, tensor
        case "model.layers.0.self_attn.o_proj.weight":  # transposed
            return name, tensor.t()
        case "model.layers.0.mlp.gate_proj.weight":  # halves swapped
            return name, tensor.roll(len(tensor) // 2, 0)
        case "model.layers.1.mlp.gate_proj.weight":  # swapped
            return name.replace("gate", "up"), tensor
        case "model.layers.1.mlp.up_proj.weight":
            return name.replace("up", "gate"), tensor
        case "model.layers.2.mlp.down_proj.weight":  # cast twice
            return name, tensor.to(torch.float8_e5m2).to(tensor.dtype)
        case "model.layers.2.self_attn.k_norm.weight":  # missing
            del targets[name]
            return None, tensor
        case "model.layers.3.self_attn.v_proj.weight":  # one bit
            changed = tensor.clone()
            changed.view(torch.int16)[7, 5] ^= 1
            return name, changed
        case "lm_head.weight":  # tied
            targets[name] = targets["model.embed_tokens.weight"]
            return None, tensor
    return name, tensor

rollout_sync.load = load

if __name__ == "__main__":
    raise SystemExit(rollout_sync.main())
"""
_FOUND = """\
  model.layers.0.self_attn.q_proj.weight: stale: the values are those of the trainer 1 step before
  model.layers.0.self_attn.o_proj.weight: transposed
  model.layers.0.mlp.gate_proj.weight: the halves of dim 0 are swapped
  model.layers.1.mlp.gate_proj.weight: swapped with model.layers.1.mlp.up_proj.weight
  model.layers.1.mlp.up_proj.weight: swapped with model.layers.1.mlp.gate_proj.weight
  model.layers.2.self_attn.k_norm.weight: the engine does not have this tensor
  model.layers.2.mlp.down_proj.weight: cast twice: to float8_e5m2 and back
  model.layers.3.self_attn.v_proj.weight: the values are different
  lm_head.weight: the engine ties this tensor to model.embed_tokens.weight, but the trainer does not
"""

_SAVING = """
import save_checkpoint

if __name__ == "__main__":
    raise SystemExit(save_checkpoint.main())
"""

_BROKEN_SAVING = """
import torch
import transformers

whole = transformers.PreTrainedModel.save_pretrained

def broken(model, directory, state_dict):
    norm = torch.zeros_like(state_dict["model.norm.weight"])
    whole(model, directory, state_dict=state_dict | {"model.norm.weight": norm})

if __name__ == "__main__":
    transformers.PreTrainedModel.save_pretrained = broken
"""


def _run(script: pathlib.Path, *arguments: str) -> str:
    """Returns what it prints, started as its README does."""
    run = torchrun("--standalone", "--nproc-per-node=2", str(script), *arguments, env={"CUDA_VISIBLE_DEVICES": ""})
    assert run.left == []
    assert run.code == 0, run.stdout + run.stderr
    return run.stdout


def _run_forked(script: pathlib.Path, text: str, *arguments: str, code: int, directory: pathlib.Path) -> str:
    """Returns what ``text`` prints, which imports the script; ``code``: how rank 0 ends, which says what was found."""
    program = directory / "program.py"
    program.write_text(_ON_THE_CPU.format(directory=str(script.parent)) + text)
    run = run_script(program, device="cpu", arguments=arguments)
    assert run.codes == [code, 0], run.output
    return run.output


def _away(output: str) -> float:
    (number,) = re.findall(r"own forward: (\S+)$", output, re.MULTILINE)
    return float(number)


def test_the_rollout_process_computes_what_the_trainers_weights_compute() -> None:
    printed = _run(ROLLOUT, "--bucket-mib", "2")
    assert re.search(r"^sent 47 tensors, 8\.5 MiB, in 5 buckets, ", printed, re.MULTILINE)
    assert "logits of the rollout process and of the unsharded weights: equal" in printed
    assert _away(printed) < 0.1


def test_a_tensor_that_is_not_sent_is_noticed(tmp_path: pathlib.Path) -> None:
    printed = _run_forked(ROLLOUT, _BROKEN_SYNC.format(rest=False), code=1, directory=tmp_path)
    assert "never arrived: model.norm.weight" in printed
    assert "unsharded weights: DIFFERENT" in printed


def test_each_planted_difference_is_named(tmp_path: pathlib.Path) -> None:
    printed = _run_forked(ROLLOUT, _PLANTED, "--bucket-mib", "2", code=1, directory=tmp_path)
    first, second = printed.split("sent 47 tensors")[1:]
    assert "the 47 tensors of the rollout process: equal" in first
    found = second.partition("of the rollout process: DIFFERENT\n")[2].partition("what was sent, and the shards")[0]
    assert sorted(found.splitlines()) == sorted(_FOUND.splitlines())
    assert "what was sent, and the shards: equal" in second


def test_a_tensor_with_other_values_is_noticed(tmp_path: pathlib.Path) -> None:
    printed = _run_forked(ROLLOUT, _BROKEN_SYNC.format(rest=True), code=1, directory=tmp_path)
    assert "never arrived" not in printed
    assert "unsharded weights: DIFFERENT" in printed


def test_the_checkpoint_holds_what_was_extracted(tmp_path: pathlib.Path) -> None:
    _check_the_checkpoint(tmp_path, _run(CHECKPOINT, str(tmp_path)))


def test_the_checkpoint_of_adapters_holds_the_merged_weights(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("peft")
    saved = tmp_path / "saved"
    _check_the_checkpoint(saved, _run_forked(CHECKPOINT, _SAVING, str(saved), "--lora", code=0, directory=tmp_path))


def _check_the_checkpoint(directory: pathlib.Path, printed: str) -> None:
    assert f"47 tensors in {directory}: equal" in printed
    assert "logits of the checkpoint and of the extracted weights: equal" in printed
    assert _away(printed) < 0.1
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(directory / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert len(names) == 46  # the tied head is not stored
    assert not any("lora" in name or "base_layer" in name for name in names)


def test_a_file_with_other_values_is_noticed(tmp_path: pathlib.Path) -> None:
    text = _BROKEN_SAVING + _SAVING
    printed = _run_forked(CHECKPOINT, text, str(tmp_path / "saved"), code=1, directory=tmp_path)
    assert "not as extracted: model.norm.weight" in printed
    assert "1 DIFFERENT" in printed
