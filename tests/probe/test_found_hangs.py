"""A hang is found soon, and what is merely slow is not called one."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from program import Run, probe, user_methods
from support.forked import fork_server

from fsdp_doctor.probe.processes import Activity

pytestmark = pytest.mark.alone

_ONE_SCENARIO = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "-k", "processes")
_HANGS = ("collective_of_one_rank", "stopped")
_COST_SECONDS = 10
_HEALTHY_SECONDS = 0.5


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run for each hang, side by side: both wait for most of their time."""

    def run(name: str) -> Run:
        methods = user_methods(*(f"processes:{each}" for each in ("healthy", name, f"{name}_1", "healthy_1")))
        return probe(tmp_path_factory.mktemp(name), *_ONE_SCENARIO, *methods)

    fork_server()
    with ThreadPoolExecutor() as pool:
        return dict(zip(_HANGS, pool.map(run, _HANGS), strict=True))


@pytest.mark.parametrize("name", _HANGS)
def test_a_hang_costs_10_seconds_at_most_where_no_deadline_is_given(hanging: dict[str, Run], name: str) -> None:
    """Holds on a machine that has time for it, as the healthy case before it tells.

    Whatever makes a worker run for a moment, or wait for a disk, begins the five seconds
    anew: of two the cheaper one counts.
    """
    run = hanging[name]
    slowness = run.result(":healthy").wall_seconds / _HEALTHY_SECONDS
    twice = run.result(f":{name}"), run.result(f":{name}_1")
    assert [result.verdict.kind for result in twice] == ["hang", "hang"], twice
    cost = min(result.wall_seconds for result in twice)
    assert cost < _COST_SECONDS * max(1.0, slowness), [result.verdict for result in twice]


@pytest.mark.parametrize("name", _HANGS)
def test_a_timeout_names_stage_and_seconds_and_the_next_case_is_ok(hanging: dict[str, Run], name: str) -> None:
    reason = hanging[name].result(f":{name}").verdict.reason
    found = re.match(r"no progress in stage (extract|agree) for ([\d.]+) s: ", reason)
    assert found
    assert 5 <= float(found[2]) <= 30
    assert hanging[name].kind(":healthy_1") == "ok"


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Starts as many processes that do nothing but work as there are processors."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    yield
    for process in busy:
        process.kill()
        process.wait()


def test_a_long_working_method_on_a_busy_machine_is_not_a_hang(tmp_path: pathlib.Path, busy_machine: None) -> None:
    run = probe(tmp_path, *_ONE_SCENARIO, *user_methods("processes:healthy", "processes:works_for_8_seconds"))
    result = run.result(":works_for_8_seconds")
    assert result.verdict.kind == "ok", result.verdict
    assert result.wall_seconds > 8


@contextlib.contextmanager
def _session_of(program: str) -> Iterator[subprocess.Popen[str]]:
    """A process that leads a session and has said that it is there; WORK is a program that does nothing but work."""
    code = f"import os, signal, subprocess, sys; WORK = 'while True: pass'; print(flush=True); {program}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_process_is_idle_only_while_it_waits_or_is_stopped() -> None:
    """Idle is how long it was so of a second in which it is looked at ten times."""
    idle = {"signal.pause()": True, "os.kill(os.getpid(), signal.SIGSTOP)": True}
    idle |= {"exec(WORK)": False, "subprocess.run([sys.executable, '-c', WORK])": False}
    with contextlib.ExitStack() as running:
        processes = {program: running.enter_context(_session_of(program)) for program in idle}
        activities = {program: Activity(process.pid) for program, process in processes.items()}
        for _ in range(10):
            time.sleep(0.1)
            seconds = {program: activity.measure_idle_seconds() for program, activity in activities.items()}
    assert {program: measured > 0.5 for program, measured in seconds.items()} == idle
