"""The scripts of examples/findings: each imports torch alone, is short, and shows what docs/findings.md says of it."""

from __future__ import annotations

import ast
import pathlib
import sys

import pytest
from program import torchrun
from support.emulation import needs_emulation
from support.places import ROOT

_SCRIPTS = sorted((ROOT / "examples" / "findings").glob("*.py"))
_EACH = pytest.mark.parametrize("script", _SCRIPTS, ids=lambda script: script.stem)
# A script knows no emulated device: it takes the accelerator that torch has.
_ON_THE_EMULATED_DEVICE = """
import runpy, sys
import fsdp_doctor.emulated
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@_EACH
def test_a_script_shows_its_finding(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    ranks = "1" if "--nproc-per-node 1" in script.read_text() else "2"
    program = script
    if "accelerator" in script.read_text():
        needs_emulation()
        program = tmp_path / "on_the_emulated_device.py"
        program.write_text(_ON_THE_EMULATED_DEVICE)
    arguments = [
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(program),
        *([str(script)] if program != script else []),
    ]
    done = torchrun(*arguments, env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)})
    assert done.code == 0, done.stdout + done.stderr


@_EACH
def test_a_script_is_short_and_needs_nothing_but_torch(script: pathlib.Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= 60
    tree = ast.parse(text)
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= {"torch", *sys.stdlib_module_names}


def test_every_script_is_named_in_the_document_and_every_one_named_is_there() -> None:
    document = (ROOT / "docs" / "findings.md").read_text()
    assert len(_SCRIPTS) > 5
    for script in _SCRIPTS:
        assert f"examples/findings/{script.name}" in document
    assert document.count("examples/findings/") == len(_SCRIPTS)
