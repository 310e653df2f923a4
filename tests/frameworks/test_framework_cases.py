"""Failures of the installed accelerate and Trainer are those that the catalogue foretells; the rest works."""

from __future__ import annotations

import pathlib

import pytest
import torch
from program import Run, probe, torchrun_script
from support.forked import run_script
from support.shims import prepare_for

from fsdp_doctor.known.catalogue import KnownFailure, read_catalogue
from fsdp_doctor.machine.versions import read_installed_versions
from fsdp_doctor.matrix.frameworks.adapters import BUILT_IN
from fsdp_doctor.matrix.frameworks.framework_matrix import read_matrix
from fsdp_doctor.matrix.frameworks.framework_scenarios import is_framework_id, parse_framework_id
from fsdp_doctor.repro import Expectation, render_framework_script

pytest.importorskip("accelerate", reason="install fsdp-doctor[frameworks-test]")
pytest.importorskip("peft", reason="install fsdp-doctor[frameworks-test]")

_ENTRIES = [entry for entry in read_catalogue() if is_framework_id(entry.evidence)]
_OK = (
    "accelerate:fsdp2/none/sharded/load_state",
    "accelerate:fsdp2/offload/full/get_state_dict",
    "accelerate:fsdp2/offload/full/load_state.fresh",
    "accelerate:fsdp2/none/full/tied/save_model",
    "accelerate:fsdp2/none/sharded/uneven/save_state.merge_fsdp_weights",
    "accelerate:fsdp1-orig/none/full/load_state.fresh",
    "trainer:fsdp2/none/full/tied/save_model",
    "trainer:fsdp2/cpu_offload/full/mixed-backend/lora/save_model.adapter",
    "trainer:fsdp2/none/sharded/resume_from_checkpoint",
)
_PACKAGES = read_installed_versions(name for framework in BUILT_IN for name in read_matrix(framework).distributions)


def _runs_here(entry: KnownFailure) -> bool:
    framework = parse_framework_id(entry.evidence).scenario.matrix.distributions[0]
    return framework in _PACKAGES


def _shows_here(entry: KnownFailure) -> bool:
    return entry.shows_with(_PACKAGES) and entry.shows_on(torch.__version__)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs all these cases once, against the catalogue."""
    evidence = [entry.evidence for entry in _ENTRIES if _runs_here(entry)]
    cases = [word for case in dict.fromkeys([*evidence, *_OK]) for word in ("--case", case)]
    return probe(tmp_path_factory.mktemp("run"), *cases, "--expect", "known", device="emulated")


def test_every_verdict_is_as_the_catalogue_foretells(run: Run) -> None:
    assert run.code == 0, run.stderr
    assert run.left == []


@pytest.mark.parametrize("entry", _ENTRIES, ids=lambda entry: entry.id)
def test_the_case_of_an_entry_shows_it_where_the_installed_versions_do(run: Run, entry: KnownFailure) -> None:
    if not _runs_here(entry):
        pytest.skip(f"{parse_framework_id(entry.evidence).scenario.framework} is not installed")
    result = run.result(entry.evidence)
    assert (result.known == entry.id) is _shows_here(entry), result.verdict


@pytest.mark.parametrize("case", _OK)
def test_what_works_is_ok(run: Run, case: str) -> None:
    assert run.kind(case) == "ok", run.result(case).verdict


def test_the_report_names_the_versions_and_each_thing_that_was_changed(run: Run) -> None:
    assert run.report is not None
    assert run.report.environment["packages"]["accelerate"] == _PACKAGES["accelerate"]
    named = {(shim.framework, shim.name) for shim in run.report.shims if shim.reason}
    listed = {(name, shim.name) for name in ("accelerate", "trainer") for shim in read_matrix(name).shims}
    assert listed <= named
    assert any("PartialState._prepare_backend" in note for note in run.report.notes)


@pytest.mark.parametrize(
    ("case_id", "fails"),
    [
        ("accelerate:fsdp2/none/sharded/uneven/save_state.merge_fsdp_weights", False),
        ("accelerate:fsdp2/none/sharded/load_state", False),
        ("accelerate:fsdp1/none/sharded/load_state.fresh", True),
        ("trainer:fsdp2/none/sharded/resume_from_checkpoint", False),
        ("trainer:fsdp2/offload_params/full/prepare", True),
        ("transformers:none/uneven/save_pretrained.consolidated", False),
        ("lightning:model-parallel/none/sharded/fit.ckpt_path", False),
    ],
)
def test_a_script_fails_where_its_case_does(case_id: str, fails: bool, tmp_path: pathlib.Path) -> None:
    case = parse_framework_id(case_id)
    pytest.importorskip(case.scenario.matrix.distributions[0])
    (tmp_path / "repro.py").write_text(render_framework_script(case, Expectation(kind="crash"), as_test=True))
    (tmp_path / "files").mkdir()
    for word in ("save", "load") if case.definition.kind == "resume" else ("",):
        program = tmp_path / "program.py"
        place = f"import os, runpy, sys\nos.chdir({str(tmp_path)!r})\nsys.argv[1:] = [{word!r}]\n"
        run_it = 'runpy.run_path("repro.py", run_name="__main__")\n'
        program.write_text(place + prepare_for(case.scenario.framework) + run_it)
        done = run_script(program, "emulated", 2)
        assert any(done.codes) is (fails and word != "save"), done.output


def test_a_script_without_accelerators_confirms_nothing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "repro.py").write_text(render_framework_script(parse_framework_id(_OK[0]), Expectation(kind="crash")))
    done = torchrun_script(tmp_path / "repro.py", tmp_path)
    assert done.code == 1
    assert "start it on 2 accelerators" in done.stderr
