"""One file of PyTorch's tests in processes of its own, and what became of each test."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Literal, get_args

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS_OF_A_FILE = 5400
# PyTorch's own limit for a test of several processes, and ours for what does not keep to it.
SECONDS_OF_A_PROCESS_TEST = 900
SECONDS_OF_A_TEST = 1000

# undone: the time of the file was over before it.
Outcome = Literal["passed", "failed", "skipped", "undone"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

# A class of tests that share their processes is skipped from its first failure on.
_AFTER_A_FAILURE = "Previous test failed, skipping"
_ENDED = "the process ended with exit code"
_NO_END = "came to no end"
_EXCEPTION = re.compile(r"^(?:E +)?((?:[\w.]*(?:Error|Exception|Skip\w*|Failure)|Exception)\b.*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Result:
    file: str
    ranks: int
    test: str
    outcome: Outcome
    text: str = ""

    @property
    def run(self) -> str:
        return f"{self.file}@{self.ranks}"

    @property
    def name(self) -> str:
        return f"{self.file}::{self.test}"

    @property
    def why(self) -> str:
        """The exception in one line: the last of a text, which is the one in the rank and not in who waited for it."""
        first = self.text.split("\n")[0]
        if first.startswith((_ENDED, _NO_END)):
            return first
        lines = [line for line in _EXCEPTION.findall(self.text) if "exited with error code" not in line]
        return lines[-1] if lines else first


def run_file(tests: pathlib.Path, file: str, ranks: int, late: bool = True) -> list[Result]:
    """Every test of ``file``, a path below ``tests``, with ``ranks`` devices; ``late``: with late completion."""
    deadline = time.monotonic() + SECONDS_OF_A_FILE
    results: dict[str, Result] = {}
    failed_once: dict[str, Result] = {}
    while True:
        states, ended = _run_rest(tests, file, ranks, late, sorted(results), deadline)
        before = len(results) + len(failed_once)
        for test, (state, text) in states.items():
            if state == "started":
                results[test] = Result(file, ranks, test, "failed", ended)
            elif state == "failed" and test not in failed_once:
                # Some of the tests are races of their own threads; PyTorch's CI gives a failed one another try, too.
                failed_once[test] = Result(file, ranks, test, "failed", text)
            elif state != "collected" and _AFTER_A_FAILURE not in text:
                results[test] = Result(file, ranks, test, state, text)
        rest = [test for test in states if test not in results]
        if not rest or len(results) + len(failed_once) == before or time.monotonic() > deadline:
            undone = {test: Result(file, ranks, test, "undone", ended) for test in rest}
            return list((undone | failed_once | results).values())


def _run_rest(
    tests: pathlib.Path, file: str, ranks: int, late: bool, done: list[str], deadline: float
) -> tuple[dict[str, tuple[Any, str]], str]:
    """The last state and text of each test that was not done before, and how the process ended."""
    with tempfile.TemporaryDirectory() as directory:
        outcomes = pathlib.Path(directory, "outcomes")
        outcomes.touch()
        _prepare(pathlib.Path(directory))
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([directory, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTORCH_SUITE_TESTS": str(tests),
            "PYTORCH_SUITE_RANKS": str(ranks),
            "PYTORCH_SUITE_LATE": "yes" if late else "no",
            "PYTORCH_SUITE_OUTCOMES": str(outcomes),
            "PYTORCH_SUITE_DONE": json.dumps(done),
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS_OF_A_PROCESS_TEST),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": directory,
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:logging",
            "-p",
            "tests.emulated.pytorch_plugin",
        ]
        command += ["-q", "--assert=plain", "--noconftest", "-c", os.devnull, "--rootdir", str(tests)]
        with pathlib.Path(directory, "printed").open("w+b") as printed:
            process = subprocess.Popen(
                [*command, str(tests / file)],
                env=env,
                cwd=directory,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ended = ending(process, outcomes, deadline)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            printed.seek(0)
            ended += "\n" + printed.read().decode(errors="replace")[-2000:]
        states: dict[str, tuple[Any, str]] = {}
        for line in outcomes.read_text().splitlines():
            test, state, text = json.loads(line)
            states[test] = state, text
        if not states and not done:
            states["(the file)"] = "failed", ended
        return states, ended


def _prepare(directory: pathlib.Path) -> None:
    """What every Python process of the tests, such as a rank, finds in its path: how it reads them, and the device."""
    (directory / "sitecustomize.py").write_text("import tests.emulated.pytorch_device\n")
    installed = directory / "pytorch_suite-0.dist-info"
    installed.mkdir()
    (installed / "entry_points.txt").write_text("[torch.backends]\nemulated = tests.emulated.pytorch_device:register\n")


def ending(process: subprocess.Popen[bytes], outcomes: pathlib.Path, deadline: float) -> str:
    while time.monotonic() < deadline and time.time() - outcomes.stat().st_mtime < SECONDS_OF_A_TEST:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"{_ENDED} {process.wait(timeout=5)}"
    return _NO_END
