"""Compares the verdicts of a run with those that are expected, and decides the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from packaging.version import InvalidVersion, Version
from typing_extensions import assert_never

from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, CannotRun, DoctorFault
from fsdp_doctor.known import catalogue
from fsdp_doctor.known.catalogue import KnownFailure
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.expected_failures import ExpectedFailures, unexpected
from fsdp_doctor.report.layout import counted
from fsdp_doctor.verdict.classification import GOOD, NOT_RUN

Baseline: TypeAlias = Report | ExpectedFailures | Literal["known"] | None
"""The verdicts of a report; the failures that a file names; those that the catalogue expects; None: all are ok."""


def surprises(report: Report, baseline: Baseline, context: RunContext) -> list[str]:
    """A sentence for each verdict that is not the expected one, the worse ones first; none without a baseline.

    A better verdict than in a report or a file is unexpected too. A better one than in the catalogue is unexpected
    only where the failure is certain: a race may be won, and the catalogue knows nothing of a method or model of the
    user's. A case that ran nothing is never unexpected: it cannot be built here, or its scenario failed before.
    """
    match baseline:
        case None:
            return []
        case "known":
            ordered = sorted(report.results, key=lambda result: not result.verdict.bad)
            return [sentence for result in ordered if (sentence := _unexpected(result, context))]
        case Report():
            return _unlike(report, baseline)
        case ExpectedFailures():
            return unexpected(report, baseline, context.torch)
        case _:
            assert_never(baseline)


def as_expected(report: Report, baseline: Baseline, context: RunContext) -> frozenset[str]:
    """The ids of the bad cases that are bad in the same way in the baseline."""
    match baseline:
        case None:
            return frozenset()
        case "known":
            return frozenset(result.id for result in report.bad if not _unexpected(result, context))
        case Report():
            kind_of = {result.id: result.verdict.kind for result in baseline.results}
            return frozenset(result.id for result in report.bad if kind_of.get(result.id) == result.verdict.kind)
        case ExpectedFailures():
            expected = {result.id: baseline.of(result.id, context.torch) for result in report.bad}
            return frozenset(
                result.id
                for result in report.bad
                if (failure := expected[result.id]) is not None and failure.met_by(result)
            )
        case _:
            assert_never(baseline)


def conclusion(report: Report, surprises: Sequence[str], context: RunContext) -> str:
    """The last line of a run that was compared with the catalogue."""
    ran = [result for result in report.results if result.verdict.kind not in NOT_RUN]
    usual = [result for result in ran if not _unexpected(result, context)]
    num_ok, num_refused = (sum(r.verdict.kind == kind for r in usual) for kind in ("ok", "refused"))
    parts = [f"{num_ok} ok", *([f"{num_refused} refused"] if num_refused else [])]
    parts += [f"{len(usual) - num_ok - num_refused} as torch {_short(context.torch)} is known to fail"]
    num_not_run = len(report.results) - len(ran)
    parts += [f"{num_not_run} not run"] if num_not_run else []
    return f"{counted(len(report.results), 'case')}: {', '.join(parts)}, {len(surprises)} unexpected"


def exit_code(report: Report, baseline: Baseline, surprises: Sequence[str]) -> int:
    """EXIT_OK or EXIT_BAD_VERDICT.

    Raises DoctorFault where a case has no result, CannotRun where nothing could be run, unless a report expected that.
    """
    if lost := report.of_kind("lost"):
        raise DoctorFault(f"{counted(lost, 'case')} without a result, which is the doctor's own fault")
    if surprises or (baseline is None and report.bad):
        return EXIT_BAD_VERDICT
    if not isinstance(baseline, Report) and all(result.verdict.kind in NOT_RUN for result in report.results):
        raise CannotRun("none of the selected cases could be run here; the reason is given with each case")
    return EXIT_OK


def _unexpected(result: CaseResult, context: RunContext) -> str:
    """The sentence for a verdict that is not as the catalogue expects; empty if it is."""
    verdict = result.verdict
    if verdict.kind in NOT_RUN:
        return ""
    outcomes = catalogue.expected_outcomes(result.case, context)
    if any(_ended_as(result, outcome) for outcome in outcomes):
        return ""
    expected = " or ".join("ok" if entry is None else f"{entry.verdict} ({entry.id})" for entry in outcomes)
    if not verdict.bad:
        return f"expected and not seen: {result.id} is {verdict.kind}, not {expected}"
    recognized = f" ({result.known})" if result.known else ""
    return f"unexpected: {result.id} is {verdict.kind}{recognized}, not {expected}: {verdict.reason}"


def _ended_as(result: CaseResult, outcome: KnownFailure | None) -> bool:
    """Whether the case ended as one expected outcome: the same verdict for another reason is another failure."""
    if outcome is None:
        return result.verdict.kind in GOOD
    return (result.verdict.kind, result.known) == (outcome.verdict, outcome.id)


def _unlike(report: Report, expected: Report) -> list[str]:
    """A sentence for each verdict that differs; a case that the expected report lacks should be ok or refused."""
    kind_of = {result.id: result.verdict.kind for result in expected.results}
    sentences = []
    for result in sorted(report.results, key=lambda result: not result.verdict.bad):
        kind, wanted = result.verdict.kind, kind_of.get(result.id, "ok")
        if kind != wanted and (result.id in kind_of or kind not in GOOD):
            sentences.append(f"expected {wanted}, got {kind}: {result.id}")
    return sentences


def _short(torch: str) -> str:
    try:
        version = Version(torch)
    except InvalidVersion:
        return torch
    return f"{version.major}.{version.minor}"
