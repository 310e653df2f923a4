"""examples/verl-5995 and examples/verl-4657: each file is what the command in their README makes now."""

from __future__ import annotations

import pathlib
import re
from dataclasses import dataclass

import pytest
from program import default_matrix, probe, torchrun_script
from support.forked import run_script
from support.inside import Done, doctor
from support.places import ROOT

from fsdp_doctor.matrix.selection import Selection, select


@dataclass(frozen=True, kw_only=True)
class Example:
    name: str
    check: tuple[str, ...]
    case: str
    remedy: str
    report: dict[str, tuple[str, ...]]
    message: str

    @property
    def directory(self) -> pathlib.Path:
        return ROOT / "examples" / self.name

    def text(self, file: str) -> str:
        return (self.directory / file).read_text(encoding="utf-8")


_EXAMPLES = (
    Example(
        name="verl-5995",
        check=("config.txt", "--torch-version", "2.9"),
        case="fsdp2/policy/staged/state_dict",
        remedy="fsdp2/policy/unstaged/remedy:weights",
        report={"strategy": ("fsdp2",), "offload": ("policy",)},
        message='RuntimeError: Attempted to set the storage of a tensor on device "cpu"',
    ),
    Example(
        name="verl-4657",
        check=("config.txt", "--framework-version", "0.7.0", "--torch-version", "2.9"),
        case="fsdp1/param/unstaged/weights_info",
        remedy="fsdp1/param/unstaged/remedy:weights",
        report={"strategy": ("fsdp1",), "offload": ("param",)},
        message="AssertionError: Expects tensor to be on the compute device",
    ),
)
_each = pytest.mark.parametrize("example", _EXAMPLES, ids=lambda example: example.name)


def _doctor(example: Example, *arguments: str) -> Done:
    return doctor(*arguments, env={"COLUMNS": "120"}, cwd=example.directory)


@_each
def test_explain_prints_what_is_kept(example: Example) -> None:
    done = _doctor(example, "explain", "log.txt")
    assert (done.code, done.stdout) == (0, example.text("explain.txt"))


@_each
def test_check_prints_what_is_kept_and_finds_the_failure(example: Example) -> None:
    done = _doctor(example, "check", *example.check)
    assert (done.code, done.stdout) == (1, example.text("check.txt"))
    assert "Known failures" in done.stdout


@_each
def test_repro_writes_the_script_that_is_kept_but_for_versions(example: Example, tmp_path: pathlib.Path) -> None:
    done = _doctor(example, "repro", example.case, "--out", str(tmp_path / "repro.py"))
    assert done.code == 0, done.stderr

    def without_versions(text: str) -> str:
        docstring, _, rest = text.partition('\n"""\n')
        return " ".join(re.sub(r"torch\s\S+,\stransformers\s\S+", "", docstring).split()) + rest

    assert without_versions((tmp_path / "repro.py").read_text()) == without_versions(example.text("repro.py"))


@_each
def test_the_script_reproduces_the_failure(example: Example, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "repro.py"
    script.write_text(example.text("repro.py"))
    done = run_script(script)
    assert done.codes == [0, 0], done.output
    assert example.message in done.output


@_each
def test_the_remedy_is_ok(example: Example, tmp_path: pathlib.Path) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{example.directory}"}
    done = probe(tmp_path, "--case", example.remedy, device="emulated", env=environment)
    assert done.kind("remedy:weights") == "ok", done.stdout


@_each
def test_the_report_has_the_verdicts_that_the_matrix_gives_here(example: Example) -> None:
    selected = {case.id for case in select(Selection(axes=example.report, fix=True))}
    results = [result for result in default_matrix().results if result.id in selected]
    assert len(results) == len(selected)
    kept = dict(re.findall(r"^\| `(\S+)` \| (?:\*\*)?(\w+)", example.text("report.md"), re.MULTILINE))
    # Of two grids of one report the later one is kept: staged comes after unstaged.
    here = {result.case.path: result.verdict.kind for result in results}
    assert {path: here[path] for path in kept if path in here} == {path: kept[path] for path in kept if path in here}
    assert len(kept) > 10


def test_a_reported_script_needs_nothing_of_ours(tmp_path: pathlib.Path) -> None:
    """Under torchrun on the CPU, where an offload moves nothing: it says what it needs, and judges nothing."""
    (tmp_path / "repro.py").write_text(_EXAMPLES[0].text("repro.py"))
    done = torchrun_script(tmp_path / "repro.py", tmp_path)
    assert done.code == 1
    assert "AssertionError: start it on 2 accelerators" in done.stderr
    assert "PASS" not in done.stdout
