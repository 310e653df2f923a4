"""The scripts of examples/findings: short, of torch and one framework; each shows what docs/findings.md says of it."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import sys

import pytest
from program import torchrun_script
from support.forked import run_script
from support.places import ROOT
from support.shims import ON_THE_EMULATED_DEVICE, prepare_for

_SCRIPTS = sorted((ROOT / "examples" / "findings").glob("*.py"))
_EACH = pytest.mark.parametrize("script", _SCRIPTS, ids=lambda script: script.stem)
# By what a script imports first of these: the adapter whose shims it needs without a GPU.
_ADAPTERS = {"trl": "accelerate", "lightning": "lightning", "verl": "verl", "accelerate": "accelerate"} | {
    "transformers": "accelerate"
}
_AS_IT_IS = """
import runpy, tempfile
tempfile.tempdir = {directory!r}
{before}
runpy.run_path({script!r}, run_name="__main__")
"""


@_EACH
def test_a_script_shows_its_finding(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    text, imported = script.read_text(), _imported(script)
    for name in sorted(imported - {"torch"} - sys.stdlib_module_names):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    before = ""
    if "accelerator" in text:
        framework = next((_ADAPTERS[name] for name in _ADAPTERS if name in imported), "")
        before = prepare_for(framework) if framework else ON_THE_EMULATED_DEVICE
    program = tmp_path / "program.py"
    program.write_text(_AS_IT_IS.format(directory=str(tmp_path), before=before, script=str(script)))
    ranks = 1 if "--nproc-per-node 1" in text else 2
    done = run_script(program, "emulated" if before else "cpu", ranks)
    assert 1 in done.codes, done.output
    assert set(done.codes) <= {0, 1}, done.output
    assert f'{script.name}", line' not in done.output, f"it did not run to its end: {done.output}"


def test_a_script_shows_its_finding_under_torchrun_with_nothing_of_ours_in_the_process(tmp_path: pathlib.Path) -> None:
    done = torchrun_script(ROOT / "examples" / "findings" / "missing_key_passes_for_strict.py", tmp_path)
    assert done.code == 1, done.stdout + done.stderr


@_EACH
def test_a_script_is_short_and_imports_one_framework(script: pathlib.Path) -> None:
    assert len(script.read_text().splitlines()) <= 40
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
