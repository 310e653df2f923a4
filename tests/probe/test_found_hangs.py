"""A hang is found soon, and what is merely slow is not called one."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from program import Run, probe, user_paths

from fsdp_doctor.probe.processes import Activity

pytestmark = pytest.mark.alone

_ONE_SCENARIO = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "-k", "processes")
_HANGS = ("collective_of_one_rank", "stopped")
_COST_SECONDS = 10
_HEALTHY_SECONDS = 0.5


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Run:
    again = [f"{name}_1" for name in _HANGS]
    paths = user_paths(*(f"processes:{name}" for name in ("healthy", *_HANGS, *again, "healthy_1")))
    return probe(tmp_path_factory.mktemp("hanging"), *_ONE_SCENARIO, *paths)


@pytest.mark.parametrize("name", _HANGS)
def test_a_hang_costs_10_seconds_at_most_where_no_deadline_is_given(hanging: Run, name: str) -> None:
    """On a machine that has time for it, as the healthy case before it tells.

    Whatever makes a worker run for a moment, or wait for a disk, begins the five seconds
    anew: of two the cheaper one counts.
    """
    slowness = hanging.result(":healthy").wall_seconds / _HEALTHY_SECONDS
    twice = hanging.result(f":{name}"), hanging.result(f":{name}_1")
    assert [result.verdict.kind for result in twice] == ["hang", "hang"], twice
    cost = min(result.wall_seconds for result in twice)
    assert cost < _COST_SECONDS * max(1.0, slowness), [result.verdict for result in twice]


@pytest.mark.parametrize("name", _HANGS)
def test_the_reason_says_in_which_stage_and_for_how_long(hanging: Run, name: str) -> None:
    found = re.match(
        r"no progress in stage (extract|agree) for ([\d.]+) s: ", hanging.result(f":{name}").verdict.reason
    )
    assert found
    assert 5 <= float(found[2]) <= 30


def test_the_case_after_a_hang_is_ok(hanging: Run) -> None:
    assert hanging.kind(":healthy_1") == "ok"


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """As many processes that do nothing but work as there are processors."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    yield
    for process in busy:
        process.kill()
        process.wait()


def test_a_path_that_works_for_long_on_a_busy_machine_is_no_hang(tmp_path: pathlib.Path, busy_machine: None) -> None:
    run = probe(tmp_path, *_ONE_SCENARIO, *user_paths("processes:healthy", "processes:works_for_12_seconds"))
    assert run.kind(":works_for_12_seconds") == "ok", run.result(":works_for_12_seconds").verdict
    assert run.result(":works_for_12_seconds").wall_seconds > 12


def test_a_path_that_waits_for_something_else_than_the_other_ranks_is_no_hang(tmp_path: pathlib.Path) -> None:
    run = probe(tmp_path, *_ONE_SCENARIO, *user_paths("processes:healthy", "processes:waits_8_seconds_for_a_service"))
    assert run.kind(":waits_8_seconds_for_a_service") == "ok", run.result(":waits_8_seconds_for_a_service").verdict
    assert run.result(":waits_8_seconds_for_a_service").wall_seconds > 8


def _session_of(program: str) -> subprocess.Popen[str]:
    """A process that leads a session and has said that it is there."""
    command = [sys.executable, "-c", f"import os, signal, subprocess, sys; print(flush=True); {program}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _idle_seconds(program: str, seconds: float = 1.0) -> float:
    """For how long the session is idle of that time; it is looked at ten times."""
    process = _session_of(program)
    try:
        activity = Activity(process.pid)
        idle = 0.0
        for _ in range(10):
            time.sleep(seconds / 10)
            idle = activity.measure_idle_seconds()
        return idle
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("program", ["signal.pause()", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_process_that_waits_or_is_stopped_is_idle(program: str) -> None:
    assert _idle_seconds(program) > 0.5


@pytest.mark.parametrize(
    "program",
    ["exec('while True: pass')", "subprocess.run([sys.executable, '-c', 'while True: pass'])"],
)
def test_a_process_that_works_or_has_another_work_for_it_is_not_idle(program: str) -> None:
    assert _idle_seconds(program) < 0.5
