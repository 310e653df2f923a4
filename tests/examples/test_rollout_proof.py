"""The rollout example names each tensor that its receiver does not hold as the trainer has it, and how it differs."""

from __future__ import annotations

import os
import pathlib

import pytest
import torch
from program import torchrun
from support.places import ROOT

EXAMPLE = ROOT / "examples" / "rollout-sync"

pytestmark = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="torch 2.6's FSDP2 cannot train on a CPU"
)

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
  model.layers.0.self_attn.q_proj.weight: stale: it is what the trainer had 1 step before
  model.layers.0.self_attn.o_proj.weight: transposed
  model.layers.0.mlp.gate_proj.weight: the halves of dim 0 are swapped
  model.layers.1.mlp.gate_proj.weight: swapped with model.layers.1.mlp.up_proj.weight
  model.layers.1.mlp.up_proj.weight: swapped with model.layers.1.mlp.gate_proj.weight
  model.layers.2.self_attn.k_norm.weight: the engine does not have it
  model.layers.2.mlp.down_proj.weight: cast twice: to float8_e5m2 and back
  model.layers.3.self_attn.v_proj.weight: it holds other values
  lm_head.weight: the engine ties it to model.embed_tokens.weight, and the trainer does not
"""


def test_each_planted_difference_is_named(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(_PLANTED)
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLE}"}
    run = torchrun("--standalone", "--nproc-per-node=2", str(script), "--bucket-mib", "2", env=env)
    assert (run.code, run.left) == (1, []), run.stdout + run.stderr
    first, second = run.stdout.split("sent 47 tensors")[1:]
    assert "the 47 tensors of the rollout process: equal" in first
    found = second.partition("of the rollout process: DIFFERENT\n")[2].partition("what was sent, and the shards")[0]
    assert sorted(found.splitlines()) == sorted(_FOUND.splitlines())
    assert "what was sent, and the shards: equal" in second
