"""A run that saves a checkpoint and fails is reported as such, costs its own cases alone, and leaves nothing."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
from program import Run, probe, start_probe, user_methods

_SCENARIOS = ("--direction", "in", "--strategy", "fsdp2", "--offload", "none,policy", "--staging", "unstaged")
_SELECTED = (*_SCENARIOS, "--checkpoint", "other-run", *user_methods("saving:loads_all"), "-k", "faults")
_LOADS = "fresh/other-run/faults.saving:loads_all"
# By the id of the scenario whose run is saved.
_FAULTS = {"fsdp2/none/unstaged": "raise", "fsdp2/policy/unstaged": "die", "fsdp2/none/unstaged/uneven": "hang"}
_REASONS = {
    "fsdp2/none/unstaged": "rank 1: ValueError: planted where it saves",
    "fsdp2/policy/unstaged": "rank 1: ended with SIGKILL",
    "fsdp2/none/unstaged/uneven": "no progress in stage checkpoint for 15 s: rank 0 waited in barrier",
}


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    limits = ("--start-timeout", "15", "--grace", "1")
    env = {"FSDP_DOCTOR_TEST_FAULTS": json.dumps(_FAULTS)}
    return probe(tmp_path_factory.mktemp("failing"), *_SELECTED, "--dims", "even,uneven", *limits, env=env)


@pytest.mark.parametrize("scenario", _FAULTS)
def test_a_failing_writer_is_the_reason_for_cases_without_its_checkpoint(failing: Run, scenario: str) -> None:
    result = failing.result(f"{scenario}/{_LOADS}")
    assert result.verdict.kind == "lost"
    assert result.verdict.reason.startswith("no checkpoint of 2 ranks: ")
    assert _REASONS[scenario] in result.verdict.reason
    assert [report.rank for report in result.ranks] == [0, 1], "the reports of the writers are the case's"


def test_a_failing_writer_costs_no_other_case_and_leaves_no_process(failing: Run) -> None:
    assert failing.report is not None, failing.stderr
    assert failing.report.complete
    assert failing.kind(f"fsdp2/policy/unstaged/uneven/{_LOADS}") == "ok"
    assert failing.code == 4
    assert failing.left == []


def test_ctrl_c_ends_the_writers_and_leaves_no_file(tmp_path: pathlib.Path) -> None:
    fifo, scratch = tmp_path / "fifo", tmp_path / "scratch"
    os.mkfifo(fifo)
    scratch.mkdir()
    faults = json.dumps({"fsdp2/none/unstaged": "hang"})
    env = {"FSDP_DOCTOR_TEST_FAULTS": faults, "FSDP_DOCTOR_TEST_FIFO": str(fifo), "TMPDIR": str(scratch)}
    started = start_probe(tmp_path / "report.json", *_SELECTED, env=env)
    started.told(fifo)
    started.interrupt()
    run = started.wait(tmp_path / "report.json")
    assert run.code == 130, run.stderr
    assert run.report is not None
    assert not run.report.complete
    assert "Traceback" not in run.stderr
    assert list(scratch.glob("fsdp-doctor-*")) == []
    assert run.left == []
