"""A run that is stopped from outside leaves what it found, says so, and leaves no process."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal

import pytest
from program import Run, Started, probe, start_probe, user_methods

_SCENARIO = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--method", "state_dict,weights_info")


def _busy_probe(directory: pathlib.Path, rank: int) -> tuple[Started, int]:
    """A run that has finished two cases and hangs in the third; the process id of that rank's supervisor."""
    fifo = directory / "fifo"
    os.mkfifo(fifo)
    env = {"FSDP_DOCTOR_TEST_FIFO": str(fifo), "FSDP_DOCTOR_TEST_RANK": str(rank)}
    busy = user_methods("processes:keeps_the_run_busy", "processes:healthy")
    started = start_probe(directory / "report.json", *_SCENARIO, *busy, "--timeout", "300", env=env)
    return started, int(started.told(fifo))


def _finished_ids(run: Run) -> list[str]:
    assert run.report is not None
    return [result.case.method for result in run.report.results]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, pathlib.Path]:
    directory = tmp_path_factory.mktemp("interrupted")
    started, _ = _busy_probe(directory, rank=0)
    started.interrupt()
    return started.wait(directory / "report.json"), directory


def test_ctrl_c_is_130_and_keeps_what_was_found(interrupted: tuple[Run, pathlib.Path]) -> None:
    run, _ = interrupted
    assert run.code == 130, run.stderr
    assert run.report is not None
    assert not run.report.complete
    assert "SIGINT" in run.report.ended
    assert _finished_ids(run) == ["state_dict", "weights_info"]
    assert "2 cases of 4 selected (incomplete: stopped by SIGINT)" in run.stderr
    assert "/state_dict\tok" in run.stdout
    assert "Traceback" not in run.stderr
    assert run.left == []


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_supervisor_ends_the_job_with_a_partial_report(tmp_path: pathlib.Path, rank: int) -> None:
    started, supervisor = _busy_probe(tmp_path, rank)
    os.kill(supervisor, signal.SIGKILL)
    run = started.wait(tmp_path / "report.json")
    assert run.code == 4, run.stderr
    assert run.report is not None
    assert not run.report.complete
    assert bool(run.report.ended) == (rank == 1), "rank 0 writes the report: when it dies, nobody is left to say why"
    assert _finished_ids(run) == ["state_dict", "weights_info"]
    assert run.left == []


def test_the_death_of_the_launcher_takes_everything_along(tmp_path: pathlib.Path) -> None:
    started, _ = _busy_probe(tmp_path, rank=0)
    os.kill(started.pid, signal.SIGKILL)
    run = started.wait(tmp_path / "report.json")
    assert run.left == []
    assert _finished_ids(run) == ["state_dict", "weights_info"]


def test_a_partial_report_is_continued(interrupted: tuple[Run, pathlib.Path], tmp_path: pathlib.Path) -> None:
    first, directory = interrupted
    for file in directory.glob("report.json*"):
        shutil.copy(file, tmp_path)
    assert first.report is not None
    run = probe(tmp_path, *_SCENARIO, *user_methods("processes:healthy"), "--resume")
    assert run.report is not None
    assert run.report.complete
    assert _finished_ids(run) == ["state_dict", "weights_info", "faults.processes:healthy"]
    assert run.report.results[0] == first.report.results[0]
    assert run.code == 0, run.stderr


def test_ctrl_c_before_any_case_leaves_no_result_of_an_older_run(
    interrupted: tuple[Run, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    """The run is interrupted while its workers start: the file says so, and keeps no result of another run."""
    shutil.copy(interrupted[1] / "report.json", tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    slow = ("--method", "faults.slow_import:healthy", "-k", "slow_import")
    env = {"FSDP_DOCTOR_TEST_FIFO": str(fifo)}
    started = start_probe(tmp_path / "report.json", *_SCENARIO, *slow, env=env)
    started.told(fifo)
    started.interrupt()
    run = started.wait(tmp_path / "report.json")
    assert run.code == 130, run.stderr
    assert run.report is not None
    assert not run.report.complete
    assert run.report.results == ()
    assert run.left == []


def test_a_full_disk_is_exit_code_4_and_the_results_are_printed(tmp_path: pathlib.Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.fail("this test needs /dev/full, which every Linux has")
    (tmp_path / "report.json.journal").symlink_to("/dev/full")
    run = probe(tmp_path, *_SCENARIO)
    assert run.code == 4
    assert "report.json.journal: No space left on device" in run.stderr
    assert "Traceback" not in run.stderr
    assert len(run.stdout.splitlines()) == 2
    assert run.left == []
