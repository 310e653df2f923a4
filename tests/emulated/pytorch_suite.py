"""PyTorch's own tests of FSDP on the emulated device, from a checkout of PyTorch.

    python -m tests.emulated.pytorch_suite --pytorch DIR [--ranks 2,4] [--file NAME ...] [--write]

The tests are read from the checkout, nothing is copied; where they and what they share name CUDA, they get the
emulated device (``pytorch_device.py``). Torch's FSDP is as it is installed. Each file runs in a process of its own; a
test that does not end or that ends the process is a failure, and the rest of its file goes on in another process.

Prints a table by file and each failure with its class, and compares with ``pytorch_suite.toml``: exit code 1 for a test
that is not as expected there. ``--write`` makes the outcomes the expectation, of the files that were run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, get_args

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = pathlib.Path("test", "distributed")
EXPECTED = pathlib.Path(__file__).with_name("pytorch_suite.toml")
FSDP2 = (
    *("training", "comm", "state_dict", "memory", "autograd", "extensions", "frozen", "state", "clip_grad_norm_"),
    *("init", "mixed_precision", "grad_scaler", "ignore_params", "logging"),
)
FSDP1 = (
    *("core", "optim_state", "mixed_precision", "state_dict", "unshard_params", "misc", "grad_acc"),
    *("use_orig_params", "summon_full_params", "sharded_grad_scaler"),
)
FILES = (
    *(f"_composable/fsdp/test_fully_shard_{name}.py" for name in FSDP2),
    "_composable/test_replicate_training.py",
    "_composable/test_composability/test_2d_composability.py",
    *(f"fsdp/test_fsdp_{name}.py" for name in FSDP1),
    "fsdp/test_wrap.py",
    *(f"checkpoint/test_{name}.py" for name in ("state_dict", "state_dict_stager", "state_dict_utils", "utils")),
    "checkpoint/e2e/test_e2e_save_and_load.py",
    "test_device_mesh.py",
)
NEEDED = ("pytest", "expecttest", "numpy")
SECONDS_OF_A_FILE = 5400
# PyTorch's own limit for a test of several processes, and ours for tests that do not keep to it.
SECONDS_OF_A_PROCESS_TEST = 900
SECONDS_OF_A_TEST = 1000

# undone: the time of the file was over before it.
Outcome = Literal["passed", "failed", "skipped", "undone"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
# Why a test fails: it, or torch for it, names CUDA's own libraries; it compiles; it was written for another version of
# torch; torch reads on the host what is still in flight; gloo adds in another order than NCCL; its own threads race; or
# the device lacks something, which is assumed until somebody has looked.
FailureClass = Literal["cuda", "compile", "version", "late", "rounding", "race", "gap"]
# Tests of these classes may as well pass, so they are not compared.
_MAY_PASS: tuple[FailureClass, ...] = ("rounding", "race")

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
    def reason(self) -> str:
        """The last exception of the text in one line, which is the rank's and not that of the process that waits."""
        first = self.text.split("\n")[0]
        if first.startswith((_ENDED, _NO_END)):
            return first
        lines = [line for line in _EXCEPTION.findall(self.text) if "exited with error code" not in line]
        return lines[-1] if lines else first


# Running a file


def run_file(tests: pathlib.Path, file: str, ranks: int, late: bool = True) -> list[Result]:
    """Every test of ``file``, a path below ``tests``, with ``ranks`` devices; ``late``: with late completion."""
    deadline = time.monotonic() + SECONDS_OF_A_FILE
    results: dict[str, Result] = {}
    failed_once: dict[str, Result] = {}
    while True:
        states, end = _run_rest(tests, file, ranks, late, sorted(results), deadline)
        before = len(results) + len(failed_once)
        for test, (state, text) in states.items():
            if state == "started":
                results[test] = Result(file, ranks, test, "failed", end)
            elif state == "failed" and test not in failed_once:
                # Some of the tests are races of their own threads; PyTorch's CI gives a failed one another try, too.
                failed_once[test] = Result(file, ranks, test, "failed", text)
            elif state != "collected" and _AFTER_A_FAILURE not in text:
                results[test] = Result(file, ranks, test, state, text)
        rest = [test for test in states if test not in results]
        if not rest or len(results) + len(failed_once) == before or time.monotonic() > deadline:
            undone = {test: Result(file, ranks, test, "undone", end) for test in rest}
            return list((undone | failed_once | results).values())


def _run_rest(
    tests: pathlib.Path, file: str, ranks: int, late: bool, done: list[str], deadline: float
) -> tuple[dict[str, tuple[Any, str]], str]:
    """The last state and text of each test that is not in ``done``, and how the process ended."""
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        outcomes = directory / "outcomes"
        outcomes.touch()
        # Every Python process of the tests, such as a rank, imports the substitutions.
        (directory / "sitecustomize.py").write_text("import tests.emulated.pytorch_device\n")
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([name, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTORCH_SUITE_TESTS": str(tests),
            "PYTORCH_SUITE_RANKS": str(ranks),
            "PYTORCH_SUITE_LATE": "yes" if late else "no",
            "PYTORCH_SUITE_OUTCOMES": str(outcomes),
            "PYTORCH_SUITE_DONE": json.dumps(done),
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS_OF_A_PROCESS_TEST),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": name,
        }
        plugins = [
            word
            for plugin in ("no:cacheprovider", "no:logging", "tests.emulated.pytorch_plugin")
            for word in ("-p", plugin)
        ]
        options = ["-q", "--assert=plain", "--noconftest", "-c", os.devnull, "--rootdir", str(tests), str(tests / file)]
        with (directory / "printed").open("w+b") as printed:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *plugins, *options],
                env=env,
                cwd=name,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            end = _wait(process, outcomes, deadline)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            printed.seek(0)
            end += "\n" + printed.read().decode(errors="replace")[-2000:]
        states: dict[str, tuple[Any, str]] = {}
        for line in outcomes.read_text().splitlines():
            test, state, text = json.loads(line)
            states[test] = state, text
        if not states and not done:
            states["(the file)"] = "failed", end
        return states, end


def _wait(process: subprocess.Popen[bytes], outcomes: pathlib.Path, deadline: float) -> str:
    while time.monotonic() < deadline and time.time() - outcomes.stat().st_mtime < SECONDS_OF_A_TEST:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"{_ENDED} {process.wait(timeout=5)}"
    return _NO_END


# What is expected


def read_expected() -> dict[str, Any]:
    return tomllib.loads(EXPECTED.read_text())


def failures_of(expected: dict[str, Any]) -> dict[str, FailureClass]:
    """The class of each test that is expected to fail, by name."""
    return {test: group["class"] for group in expected.get("failures", ()) for test in group["tests"]}


def totals_of(results: Sequence[Result]) -> dict[str, list[int]]:
    """Returns how many tests passed, failed and were skipped, by file and ranks."""
    totals: dict[str, list[int]] = {}
    for result in results:
        totals.setdefault(result.run, [0] * len(OUTCOMES))[OUTCOMES.index(result.outcome)] += 1
    return totals


def differences(results: Sequence[Result]) -> list[str]:
    """A sentence for each test and each total that is not as expected."""
    expected = read_expected()
    failures, totals = failures_of(expected), expected.get("totals", {})
    compared = [result for result in results if failures.get(result.name) not in _MAY_PASS]
    sentences = []
    for result in compared:
        where = f"{result.name} with {result.ranks} ranks"
        if result.outcome == "passed" and result.name in failures:
            sentences.append(f"passed, and expected to fail: {where} ({failures[result.name]})")
        if result.outcome == "failed" and result.name not in failures:
            sentences.append(f"failed, and expected to pass: {where}: {result.reason}")
    for run, counts in totals_of(compared).items():
        if totals.get(run, counts) != counts:
            sentences.append(f"{run}: {_words(counts)}, and expected: {_words(totals[run])}")
    return sentences


def _words(totals: Sequence[int]) -> str:
    return ", ".join(f"{count} {outcome}" for count, outcome in zip(totals, OUTCOMES, strict=True) if count)


def write_expected(results: Sequence[Result], versions: dict[str, str]) -> None:
    """Makes ``results`` the expectation of the files and ranks that were run; the others keep theirs."""
    expected = read_expected()
    before = failures_of(expected)
    totals = totals_of([result for result in results if before.get(result.name) not in _MAY_PASS])
    failed = {result.name: result for result in results if result.outcome == "failed"}
    passed = {result.name for result in results if result.outcome == "passed"}
    groups: dict[tuple[str, str], list[str]] = {}
    for group in expected.get("failures", ()):
        kept = [test for test in group["tests"] if group["class"] in _MAY_PASS or test not in passed]
        groups.setdefault((group["class"], group["reason"]), []).extend(kept)
    for name in failed.keys() - before.keys():
        groups.setdefault(("gap", failed[name].reason), []).append(name)
    lines = [
        "# What PyTorch's tests give on the emulated device, written by tests/emulated/pytorch_suite.py --write;",
        "# the classes and reasons of the failures are written by hand.",
        *(f'{name} = "{version}"' for name, version in versions.items()),
        "",
        f"# {', '.join(OUTCOMES)}, of a file with that many ranks, without those that may as well pass.",
        "[totals]",
        *(f'"{run}" = {counts}' for run, counts in sorted((expected.get("totals", {}) | totals).items())),
    ]
    for (name, reason), tests in sorted(groups.items()):
        if tests:
            lines += ["", "[[failures]]", f'class = "{name}"', f"reason = {json.dumps(reason)}"]
            lines += ["tests = [", *(f'    "{test}",' for test in sorted(tests)), "]"]
    EXPECTED.write_text("\n".join(lines) + "\n")


# The command


def _row(head: str, results: Sequence[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    return head + " " + " ".join(f"{counts[outcome]:7}" for outcome in OUTCOMES)


def parse_options() -> argparse.Namespace:
    """The options; ``files`` are those of the checkout, ``missing`` those that it lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch", type=pathlib.Path, required=True, metavar="DIR", help="a checkout of PyTorch")
    parser.add_argument("--ranks", default="2,4", help="how many devices the tests see, one run for each number")
    parser.add_argument("--file", action="append", metavar="NAME", help="only files whose path contains NAME")
    parser.add_argument("--no-late-completion", action="store_true", help="copies finish at once; compares nothing")
    parser.add_argument("--write", action="store_true", help="make the outcomes the expectation")
    options = parser.parse_args()
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", options.ranks):
        parser.error(f"--ranks: {options.ranks} is not a list of numbers such as 2,4")
    wanted = [file for file in FILES if not options.file or any(part in file for part in options.file)]
    if not wanted:
        parser.error(f"--file: no file has {' or '.join(options.file)} in its path")
    tests = options.pytorch / TESTS
    options.files = [file for file in wanted if (tests / file).is_file()]
    options.missing = [file for file in wanted if file not in options.files]
    if not options.files:
        parser.error(f"--pytorch: {options.pytorch} has none of the {len(wanted)} files, such as {TESTS / wanted[0]}")
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(f"PyTorch's tests need {', '.join(absent)}: pip install {' '.join(absent)}")
    return options


def main() -> int:
    options = parse_options()
    print(f"{'file':60} {'ranks':>5} " + " ".join(f"{outcome:>7}" for outcome in OUTCOMES))
    results: list[Result] = []
    for ranks in map(int, options.ranks.split(",")):
        for file in options.files:
            done = run_file((options.pytorch / TESTS).resolve(), file, ranks, late=not options.no_late_completion)
            print(_row(f"{file:60} {ranks:5}", done), flush=True)
            results += done
    print(_row(" " * 66, results))
    for file in options.missing:
        print(f"not in this checkout: {file}")
    classes = failures_of(read_expected())
    for result in results:
        if result.outcome in ("failed", "undone"):
            where = f"{result.name} with {result.ranks} ranks"
            print(f"{result.outcome}: {where}: {classes.get(result.name, 'gap')}: {result.reason[:200]}")
    for reason, count in Counter(result.text for result in results if result.outcome == "skipped").most_common():
        print(f"skipped: {count}: {reason.removeprefix('Skipped: ')}")
    if options.no_late_completion:
        return 0
    file = options.pytorch / "version.txt"
    versions = {
        "torch": importlib.metadata.version("torch").split("+")[0],
        "tests": file.read_text().strip() if file.is_file() else "unknown",
    }
    if options.write:
        write_expected(results, versions)
        return 0
    expected = read_expected()
    print(
        f"expected are the outcomes of { ({name: expected.get(name) for name in versions}) }; these are of {versions}"
    )
    sentences = differences(results)
    print("\n".join(sentences) if sentences else "everything is as expected")
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
