"""Renders JUnit XML for CI systems: a test suite for each scenario, and a test case for each method."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeAlias
from xml.etree import ElementTree

from typing_extensions import assert_never

from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.layout import rerun_command
from fsdp_doctor.text import make_printable

_Outcome: TypeAlias = Literal["passed", "skipped", "error", "failure"]


def render(report: Report, expected: Collection[str] = ()) -> str:
    """Renders the report. Bad cases whose ids are in ``expected`` become skipped tests."""
    root = ElementTree.Element("testsuites", name="fsdp-doctor", time=f"{report.seconds:.3f}")
    suites: dict[str, list[CaseResult]] = {}
    for result in report.results:
        suites.setdefault(result.case.scenario.id, []).append(result)
    for name, results in suites.items():
        outcomes = [_choose_outcome(result, expected) for result in results]
        counts = {
            "tests": str(len(results)),
            "failures": str(outcomes.count("failure")),
            "errors": str(outcomes.count("error")),
            "skipped": str(outcomes.count("skipped")),
            "time": f"{sum(result.wall_seconds for result in results):.3f}",
        }
        suite = ElementTree.SubElement(root, "testsuite", {"name": name, **counts})
        for result, outcome in zip(results, outcomes, strict=True):
            _add_case(suite, report, result, outcome, "as expected, " if result.id in expected else "")
    if report.notes:
        properties = ElementTree.SubElement(root, "properties")
        ElementTree.SubElement(properties, "property", name="notes", value=make_printable(" ".join(report.notes)))
    if not report.complete:
        suite = ElementTree.SubElement(root, "testsuite", name="run", tests="1", errors="1", failures="0", skipped="0")
        case = ElementTree.SubElement(suite, "testcase", name="complete", classname="run")
        missing = report.num_selected - len(report.results)
        message = make_printable(f"the run is incomplete: {report.ended}; {missing} cases have no result")
        ElementTree.SubElement(case, "error", message=message)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _choose_outcome(result: CaseResult, expected: Collection[str]) -> _Outcome:
    if result.id in expected:
        return "skipped"
    match result.verdict.kind:
        case "ok" | "refused":
            return "passed"
        case "unsupported" | "skipped":
            return "skipped"
        case "lost":
            return "error"
        case "wrong" | "race" | "incomplete" | "misplaced" | "poisoned" | "leak" | "order":
            return "failure"
        case "crash" | "hang" | "died" | "oom":
            return "failure"
        case kind:
            assert_never(kind)


def _add_case(suite: ElementTree.Element, report: Report, result: CaseResult, outcome: _Outcome, preface: str) -> None:
    verdict, scenario = result.verdict, result.case.scenario
    names = {"name": make_printable(result.method), "classname": scenario.id, "time": f"{result.wall_seconds:.3f}"}
    case = ElementTree.SubElement(suite, "testcase", names)
    if outcome == "passed":
        if verdict.kind == "refused":
            ElementTree.SubElement(case, "system-out").text = make_printable(f"{verdict.kind}: {verdict.reason}")
        return
    known = f" (known: {result.known})" if result.known else ""
    message = f"{preface}{verdict.kind}: {verdict.reason}{known}"
    if result.confirmation is not None:
        message += f" (run again in fresh workers: {result.confirmation.kind})"
    element = ElementTree.SubElement(case, outcome, message=make_printable(message))
    if outcome == "skipped":
        return
    element.set("type", verdict.kind)
    tracebacks = [
        f"rank {r.rank}:\n{r.record.failure.traceback}" for r in result.ranks if r.record and r.record.failure
    ]
    stacks = [f"rank {r.rank}:\n{r.stack}" for r in result.ranks if r.stack]
    parts = [message, *verdict.also, rerun_command(report, result), *tracebacks, *stacks]
    element.text = make_printable("\n".join(parts))
