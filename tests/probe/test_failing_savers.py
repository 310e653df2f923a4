"""A run that saves and fails is told as such, costs its own cases alone, and leaves nothing."""

from __future__ import annotations

import os
import pathlib
import signal

import pytest
from program import Run, Started, probe, start_probe, user_paths

_SCENARIOS = ("--direction", "in", "--strategy", "fsdp2", "--offload", "none,policy", "--staging", "unstaged")
_SELECTED = (*_SCENARIOS, "--checkpoint", "other-run", *user_paths("saving:loads_all"), "-k", "faults")
# Of the two runs that are saved, by its id.
_FAILING = "fsdp2/none/unstaged"


def _environment(fault: str) -> dict[str, str]:
    return {"FSDP_DOCTOR_TEST_SCENARIO": _FAILING, "FSDP_DOCTOR_TEST_FAULT": fault}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", "rank 1: ValueError: planted where it saves"),
        ("die", "rank 1: ended with SIGKILL"),
        ("hang", "no progress in stage checkpoint for 15 s: rank 0 waited in barrier"),
    ],
)
def test_a_failing_saver_is_told_and_costs_its_own_cases_alone(tmp_path: pathlib.Path, fault: str, reason: str) -> None:
    limits = ("--start-timeout", "15", "--grace", "1")
    run = probe(tmp_path, *_SELECTED, "--path", "dcp.load", *limits, env=_environment(fault))
    assert run.report is not None, run.stderr
    assert run.report.complete
    result = run.result("fsdp2/none/unstaged/fresh/other-run/faults.saving:loads_all")
    verdict = result.verdict
    assert verdict.kind == "lost"
    assert verdict.reason.startswith("no checkpoint of 2 ranks: ")
    assert reason in verdict.reason
    assert [report.rank for report in result.ranks] == [0, 1], "what the savers said is in the report"
    assert run.kind("fsdp2/policy/unstaged/fresh/other-run/faults.saving:loads_all") == "ok"
    assert run.code == 4
    assert run.left == []


def _saving(directory: pathlib.Path) -> tuple[Started, int]:
    """A run whose savers hang, and the process id of the supervisor that looks after them."""
    fifo, scratch = directory / "fifo", directory / "scratch"
    os.mkfifo(fifo)
    scratch.mkdir()
    env = {**_environment("hang"), "FSDP_DOCTOR_TEST_FIFO": str(fifo), "TMPDIR": str(scratch)}
    started = start_probe(directory / "report.json", *_SELECTED, env=env)
    return started, int(started.told(fifo))


def _finished(started: Started, directory: pathlib.Path) -> Run:
    run = started.wait(directory / "report.json")
    assert run.left == []
    assert run.report is not None
    assert not run.report.complete
    return run


def test_ctrl_c_ends_the_savers_and_leaves_no_file(tmp_path: pathlib.Path) -> None:
    started, _ = _saving(tmp_path)
    started.interrupt()
    run = _finished(started, tmp_path)
    assert run.code == 130, run.stderr
    assert "Traceback" not in run.stderr
    assert list((tmp_path / "scratch").glob("fsdp-doctor-*")) == []


def test_savers_die_with_their_supervisor(tmp_path: pathlib.Path) -> None:
    started, supervisor = _saving(tmp_path)
    os.kill(supervisor, signal.SIGKILL)
    assert _finished(started, tmp_path).code == 4
