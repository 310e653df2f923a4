"""The scripts of examples/findings: short, of torch and one framework; each shows what docs/findings.md says of it."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from program import torchrun_script
from support.forked import run_script
from support.places import ROOT
from support.shims import ON_THE_EMULATED_DEVICE, prepare_for

_FINDINGS = ROOT / "examples" / "findings"
_SCRIPTS = sorted(_FINDINGS.glob("[!_]*.py"))
_EACH = pytest.mark.parametrize("script", _SCRIPTS, ids=lambda script: script.stem)
# By what a script imports first of these: the adapter whose shims it needs without a GPU.
_ADAPTERS = {"trl": "accelerate", "lightning": "lightning", "verl": "verl", "accelerate": "accelerate"} | {
    "transformers": "accelerate",
    "megatron_fsdp": "megatron_fsdp_adapter:ADAPTER",
}
_AS_IT_IS = """
import runpy, sys, tempfile
sys.path.append({adapters!r})
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
    program.write_text(
        _AS_IT_IS.format(
            adapters=str(ROOT / "examples" / "adapters" / "megatron_fsdp"),
            directory=str(tmp_path),
            before=before,
            script=str(script),
        )
    )
    ranks = 1 if "--nproc-per-node 1" in text else 2
    done = run_script(program, "emulated" if before else "cpu", ranks)
    assert set(done.codes) == {0}, done.output
    assert "shown" in done.output.splitlines(), done.output


def test_a_script_shows_its_finding_under_torchrun_without_fsdp_doctor(tmp_path: pathlib.Path) -> None:
    done = torchrun_script(ROOT / "examples" / "findings" / "missing_key_passes_for_strict.py", tmp_path)
    assert done.code == 0, done.stdout + done.stderr
    assert "shown" in done.stdout.splitlines()


def test_the_runner_tells_what_is_shown_from_what_could_not_run(tmp_path: pathlib.Path) -> None:
    """The scripts of a copy end well, with another outcome, and for lack of a package."""
    shutil.copytree(_FINDINGS, tmp_path / "examples" / "findings")
    for script in (tmp_path / "examples" / "findings").glob("[!_]*.py"):
        script.unlink()
    bodies = {"a": 'print("shown")', "b": 'print("not shown")', "c": "import not_there", "d": "raise SystemExit(1)"}
    for name, body in bodies.items():
        (tmp_path / "examples" / "findings" / f"{name}.py").write_text(f"# --nproc-per-node 1\n{body}\n")
    command = [sys.executable, "-m", "examples.findings", "--log", "log.txt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    outcomes = [line.partition(" s  ")[2] for line in done.stdout.splitlines()]
    missing = "could not run: ModuleNotFoundError: No module named 'not_there'"
    assert (done.returncode, outcomes) == (3, ["shown", "not shown", missing, "could not run: exit code 1"])
    assert "== a: shown" in (tmp_path / "log.txt").read_text()


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


def test_the_document_names_exactly_the_scripts_that_exist() -> None:
    document = (ROOT / "docs" / "findings.md").read_text()
    assert len(_SCRIPTS) > 5
    for script in _SCRIPTS:
        assert f"examples/findings/{script.name}" in document
    assert len(re.findall(r"examples/findings/\w+\.py", document)) == len(_SCRIPTS)
