"""JUnit XML, for CI systems: a test suite for each scenario, a test case for each path."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeAlias
from xml.etree import ElementTree

from typing_extensions import assert_never

from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.layout import printable, rerun_command


def render(report: Report, expected: Collection[str] = ()) -> str:
    """``expected``: the ids of bad cases that are no failures of the job; they are told as skipped."""
    root = ElementTree.Element("testsuites", name="fsdp-doctor", time=f"{report.seconds:.3f}")
    suites: dict[str, list[CaseResult]] = {}
    for result in report.results:
        suites.setdefault(result.case.scenario.id, []).append(result)
    for name, results in suites.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": name, **_counts(results, expected)})
        for result in results:
            _testcase(suite, report, result, expected)
    if report.notes:
        properties = ElementTree.SubElement(root, "properties")
        ElementTree.SubElement(properties, "property", name="notes", value=printable(" ".join(report.notes)))
    if not report.complete:
        suite = ElementTree.SubElement(root, "testsuite", name="run", tests="1", errors="1", failures="0", skipped="0")
        case = ElementTree.SubElement(suite, "testcase", name="complete", classname="run")
        missing = report.num_selected - len(report.results)
        message = printable(f"the run is incomplete: {report.ended}; {missing} cases have no result")
        ElementTree.SubElement(case, "error", message=message)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _counts(results: list[CaseResult], expected: Collection[str]) -> dict[str, str]:
    kinds = [_outcome(result, expected) for result in results]
    return {
        "tests": str(len(results)),
        "failures": str(kinds.count("failure")),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
        "time": f"{sum(result.wall_seconds for result in results):.3f}",
    }


_Outcome: TypeAlias = Literal["", "skipped", "error", "failure"]


def _outcome(result: CaseResult, expected: Collection[str]) -> _Outcome:
    """The element that a test case has in it; none where it passed."""
    if result.id in expected:
        return "skipped"
    match result.verdict.kind:
        case "ok" | "refused":
            return ""
        case "unsupported" | "skipped":
            return "skipped"
        case "lost":
            return "error"
        case "wrong" | "incomplete" | "misplaced" | "crash" | "hang" | "died" | "oom" | "poisoned" | "leak":
            return "failure"
        case kind:
            assert_never(kind)


def _testcase(suite: ElementTree.Element, report: Report, result: CaseResult, expected: Collection[str]) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        name=printable(result.case.path),
        classname=result.case.scenario.id,
        time=f"{result.wall_seconds:.3f}",
    )
    outcome, verdict = _outcome(result, expected), result.verdict
    if verdict.kind == "refused":
        ElementTree.SubElement(case, "system-out").text = printable(f"{verdict.kind}: {verdict.reason}")
    if not outcome:
        return
    message = f"{'as expected, ' if result.id in expected else ''}{verdict.kind}: {verdict.reason}"
    if result.confirmation is not None:
        message += f" (run again in fresh workers: {result.confirmation.kind})"
    element = ElementTree.SubElement(case, outcome, message=printable(message))
    if outcome != "skipped":
        element.set("type", verdict.kind)
        tracebacks = [
            f"rank {r.rank}:\n{r.record.failure.traceback}" for r in result.ranks if r.record and r.record.failure
        ]
        stacks = [f"rank {r.rank}:\n{r.stack}" for r in result.ranks if r.stack]
        known = [f"known: {result.known}"] if result.known else []
        element.text = printable(
            "\n".join([message, *verdict.also, *known, rerun_command(report, result), *tracebacks, *stacks])
        )
