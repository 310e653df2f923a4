"""Runs pytest with the plugin in separate processes, and reads the result of each test."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from program import Run, Started

from support.places import TESTS

SUITES = TESTS / "plugin" / "suites"
# The plugin is named explicitly, because the metadata of an older editable install may lack its entry point.
_ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
_PLUGIN = ("-p", "fsdp_doctor.plugin.hooks")


@dataclasses.dataclass(frozen=True)
class TestResult:
    """The result of one test.

    outcome: passed, failed, error or skipped.
    text: the text of the report.
    seconds: the duration of all phases.
    """

    __test__ = False

    outcome: str
    message: str
    text: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class PytestRun:
    """A run of pytest. ``results``: maps the name of each test, with its parameters, to its result."""

    run: Run
    results: dict[str, TestResult]

    def __getitem__(self, name: str) -> TestResult:
        return self.results[name]


def run_pytest(directory: pathlib.Path, *arguments: str, suites: Sequence[str] = (), plugin: bool = True) -> PytestRun:
    """Runs pytest in ``directory`` on copies of the named suites. Fails if a process is left running."""
    junit = directory / "junit.xml"
    report = ("--junitxml", str(junit), "-o", "junit_logging=all")
    done = start_pytest(directory, *report, *arguments, suites=suites, plugin=plugin).wait()
    assert done.left == [], done.left
    return PytestRun(done, _results(junit) if junit.exists() else {})


def start_pytest(
    directory: pathlib.Path,
    *arguments: str,
    suites: Sequence[str] = (),
    plugin: bool = True,
    env: Mapping[str, str] | None = None,
) -> Started:
    for suite in suites:
        shutil.copy(SUITES / f"{suite}.py", directory / f"test_{suite}.py")
    here = ("--rootdir", str(directory), "-c", "/dev/null")
    command = (sys.executable, "-m", "pytest", *(_PLUGIN if plugin else ()), *here, *arguments)
    return Started(*command, env={**_ALONE, **(env or {})}, cwd=directory)


def _results(junit: pathlib.Path) -> dict[str, TestResult]:
    return {case.attrib["name"]: _result(case) for case in ElementTree.parse(junit).iter("testcase")}


def _result(case: ElementTree.Element) -> TestResult:
    outcomes = [child for child in case if child.tag in ("failure", "error", "skipped")]
    printed = "".join(child.text or "" for child in case if child.tag.startswith("system-"))
    return TestResult(
        outcome={"failure": "failed"}.get(outcomes[0].tag, outcomes[0].tag) if outcomes else "passed",
        message=outcomes[0].attrib.get("message", "") if outcomes else "",
        text="".join(child.text or "" for child in outcomes) + printed,
        seconds=float(case.attrib["time"]),
    )
