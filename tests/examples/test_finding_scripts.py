"""The scripts of examples/findings: short, of torch and one framework; each shows what docs/findings.md says of it."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import sys

import pytest
from program import torchrun
from support.emulation import needs_emulation
from support.places import ROOT

_SCRIPTS = sorted((ROOT / "examples" / "findings").glob("*.py"))
_EACH = pytest.mark.parametrize("script", _SCRIPTS, ids=lambda script: script.stem)
# By what a script imports first of these: the adapter whose shims it needs without a GPU.
_ADAPTERS = {"trl": "accelerate", "lightning": "lightning", "verl": "verl", "accelerate": "accelerate"} | {
    "transformers": "accelerate"
}
# A script knows no emulated device: it takes the accelerator that torch has, or that its framework finds.
_ON_THE_EMULATED_DEVICE = """
import os, runpy, sys
import torch, fsdp_doctor.emulated
_, script, framework = sys.argv
torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
if framework:
    from fsdp_doctor.frameworks.installed import adapter_of
    from fsdp_doctor.frameworks.shimming import Shimming
    adapter = adapter_of(framework)
    with Shimming(adapter.matrix) as shims:
        adapter.on_emulated(shims)
runpy.run_path(script, run_name="__main__")
"""


@_EACH
def test_a_script_shows_its_finding(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    ranks = "1" if "--nproc-per-node 1" in script.read_text() else "2"
    imported = _imported(script)
    for name in sorted(imported - {"torch"} - sys.stdlib_module_names):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    command = [str(script)]
    if "accelerator" in script.read_text():
        needs_emulation()
        program = tmp_path / "on_the_emulated_device.py"
        program.write_text(_ON_THE_EMULATED_DEVICE)
        command = [str(program), str(script), next((_ADAPTERS[name] for name in _ADAPTERS if name in imported), "")]
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = torchrun("--standalone", f"--nproc-per-node={ranks}", *command, env=env)
    assert done.code == 1, done.stdout + done.stderr
    assert f'{script.name}", line' not in done.stderr, f"it did not run to its end: {done.stderr}"


@_EACH
def test_a_script_is_short_and_imports_one_framework(script: pathlib.Path) -> None:
    assert len(script.read_text().splitlines()) <= 60
    # accelerate and peft are what others are built on.
    assert len(_imported(script) - {"torch", "accelerate", "peft", *sys.stdlib_module_names}) <= 1


def _imported(script: pathlib.Path) -> set[str]:
    tree = ast.parse(script.read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_every_script_is_named_in_the_document_and_every_one_named_is_there() -> None:
    document = (ROOT / "docs" / "findings.md").read_text()
    assert len(_SCRIPTS) > 5
    for script in _SCRIPTS:
        assert f"examples/findings/{script.name}" in document
    assert document.count("examples/findings/") == len(_SCRIPTS)
