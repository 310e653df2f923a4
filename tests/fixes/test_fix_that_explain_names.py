"""The log of a job that fails in transformers' own FSDP2, the fix that ``explain`` names, and the job with it."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
from packaging.specifiers import SpecifierSet
from program import Run, run
from support.emulation import needs_emulation
from support.inside import doctor
from support.places import ROOT
from support.shims import prepare_for

from fsdp_doctor.fixes import entry
from fsdp_doctor.machine.versions import read_installed_versions

_PROGRAM = """
import os, sys
import torch
import fsdp_doctor.emulated
from fsdp_doctor.emulated.library import _C
_C.set_device_count(2)
{before}
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.distributed import DistributedConfig

def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8, device=torch.accelerator.current_accelerator()).reshape(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
small = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=256, num_hidden_layers=2, head_dim=16, **sizes))
directory = f"{place}/{{os.environ['RANK']}}"
small.save_pretrained(directory)
config = DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]), fsdp_cpu_offload=True)
print(f"transformers {{transformers.__version__}}", config)
model = AutoModelForCausalLM.from_pretrained(directory, distributed_config=config, dtype=torch.float32)
if sys.argv[1] == "by hand":
    model.to("cpu")
train(model)
print("trained")
"""


def _run(place: pathlib.Path, *command: str) -> Run:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return run(sys.executable, *command, env={"PYTHONPATH": path}, cwd=place)


@pytest.mark.parametrize(("moved", "code"), [("as read", "FD006"), ("by hand", "FD015")])
def test_the_fix_that_explain_names_mends_a_job_of_transformers(tmp_path: pathlib.Path, moved: str, code: str) -> None:
    """Whoever moves the shards to the CPU by hand meets the missing backend next."""
    needs_emulation()
    version = read_installed_versions(["transformers"]).get("transformers", "0")
    if not any(SpecifierSet(fix.versions).contains(version) for fix in entry.list_fixes("transformers")):
        pytest.skip(f"transformers {version} is not a release of the fixes")
    (tmp_path / "job.py").write_text(_PROGRAM.format(before=prepare_for("transformers"), place=tmp_path))
    job = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "job.py", moved)
    failed = _run(tmp_path, *job)
    (tmp_path / "job.log").write_text(failed.stdout + failed.stderr)
    assert failed.code == 1, failed
    answer = doctor("explain", str(tmp_path / "job.log"), cwd=tmp_path).stdout
    command = next(line for line in answer.splitlines() if line.startswith("Fix: "))
    assert f"({code})" in answer.partition("Fix: ")[0]
    words = command.partition("fsdp-doctor ")[2].partition(" COMMAND")[0].split()
    fixed = _run(tmp_path, "-m", "fsdp_doctor", *words, sys.executable, *job)
    assert (fixed.code, fixed.left, fixed.stdout.count("trained")) == (0, [], 2), fixed
