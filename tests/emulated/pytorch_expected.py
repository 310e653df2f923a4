"""What PyTorch's tests are expected to give (``pytorch_suite.toml``): totals by file, and failures with a class."""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any, Literal

from tests.emulated.pytorch_run import OUTCOMES, Result

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXPECTED = pathlib.Path(__file__).with_name("pytorch_suite.toml")

# Why a test fails: it, or torch for it, names CUDA's own libraries; it compiles; it was written for another version of
# torch; torch reads on the host what is still in flight; gloo adds in another order than NCCL; its own threads race; or
# the device lacks something.
FailureClass = Literal["cuda", "compile", "version", "late", "rounding", "race", "gap"]
# These may as well pass, as with fewer ranks, so nothing is held against them.
_MAY_PASS: tuple[FailureClass, ...] = ("rounding", "race")
_CLASSES: tuple[tuple[FailureClass, str], ...] = (
    ("compile", r"torch\._dynamo|torch\._inductor|InductorError|BackendCompilerFailed|[Tt]riton"),
    ("cuda", r"Torch not compiled with CUDA|Found no NVIDIA driver|nccl|NCCL|CUDA error"),
    ("version", r"ImportError|ModuleNotFoundError|unexpected keyword argument"),
)


def read() -> dict[str, Any]:
    return tomllib.loads(EXPECTED.read_text())


def class_of(result: Result) -> str:
    """The expected class, or what the text suggests; what it says nothing about is a gap until somebody has looked."""
    return failures_of(read()).get(result.name) or next(
        (name for name, pattern in _CLASSES if re.search(pattern, result.why)), "gap"
    )


def failures_of(expected: dict[str, Any]) -> dict[str, str]:
    """The class of each test that is expected to fail, by name."""
    return {test: group["class"] for group in expected.get("failures", ()) for test in group["tests"]}


def totals_of(results: Sequence[Result]) -> dict[str, list[int]]:
    """How many tests passed, failed and were skipped, by file and ranks."""
    totals: dict[str, list[int]] = {}
    for result in results:
        totals.setdefault(result.run, [0] * len(OUTCOMES))[OUTCOMES.index(result.outcome)] += 1
    return totals


def surprises(results: Sequence[Result]) -> list[str]:
    """A sentence for each test and each total that is not as expected."""
    expected = read()
    failures = failures_of(expected)
    results = [result for result in results if failures.get(result.name) not in _MAY_PASS]
    found = []
    for result in results:
        where = f"{result.name} with {result.ranks} ranks"
        if result.outcome == "passed" and result.name in failures:
            found.append(f"passed, and expected to fail: {where} ({failures[result.name]})")
        if result.outcome == "failed" and result.name not in failures:
            found.append(f"failed, and expected to pass: {where} ({class_of(result)}): {result.why}")
    before = expected.get("totals", {})
    for run, totals in totals_of(results).items():
        if before.get(run, totals) != totals:
            found.append(f"{run}: {_words(totals)}, and expected: {_words(before[run])}")
    return found


def unlisted(results: Sequence[Result]) -> list[str]:
    """The files with a number of ranks whose totals are not listed; their tests are compared all the same."""
    return sorted(totals_of(results).keys() - read().get("totals", {}).keys())


def _words(totals: Sequence[int]) -> str:
    return ", ".join(f"{count} {outcome}" for count, outcome in zip(totals, OUTCOMES, strict=True) if count)


def comparison(here: dict[str, str]) -> str:
    """Which versions are compared: a test of another one may have changed."""
    expected = read()
    there = ", ".join(f"{name} {expected.get(name)}" for name in here)
    return f"expected are the outcomes of {there}; these are of {', '.join(map(' '.join, here.items()))}"


def write(results: Sequence[Result], versions: dict[str, str]) -> None:
    """Makes ``results`` the expectation of the files and ranks that were run; the others keep theirs."""
    expected = read()
    before = failures_of(expected)
    totals = totals_of([result for result in results if before.get(result.name) not in _MAY_PASS])
    failed = {result.name: result for result in results if result.outcome == "failed"}
    passed = {result.name for result in results if result.outcome == "passed"}
    groups: dict[tuple[str, str], list[str]] = {}
    for group in expected.get("failures", ()):
        stays = [test for test in group["tests"] if group["class"] in _MAY_PASS or test not in passed]
        groups.setdefault((group["class"], group["reason"]), []).extend(stays)
    for name in failed.keys() - before.keys():
        groups.setdefault((class_of(failed[name]), failed[name].why), []).append(name)
    lines = [
        "# What PyTorch's tests give on the emulated device, written by tests/emulated/pytorch_suite.py --write;",
        "# the classes and reasons of the failures are written by hand.",
        *(f'{name} = "{version}"' for name, version in versions.items()),
        "",
        f"# {', '.join(OUTCOMES)}, of a file with that many ranks, without those that may as well pass.",
        "[totals]",
        *(f'"{name}" = {totals}' for name, totals in sorted((expected.get("totals", {}) | totals).items())),
    ]
    for (name, reason), tests in sorted(groups.items()):
        if tests:
            lines += ["", "[[failures]]", f'class = "{name}"', f"reason = {json.dumps(reason)}"]
            lines += ["tests = [", *(f'    "{test}",' for test in sorted(tests)), "]"]
    EXPECTED.write_text("\n".join(lines) + "\n")
