"""What the verdicts of a run are held against, what is not as it should be, and the exit code that follows."""

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
"""The verdicts of a report; the failures that a file names; what the catalogue foretells; or None, that all is ok."""


def surprises(report: Report, baseline: Baseline, context: RunContext) -> list[str]:
    """A sentence for each verdict that is not the baseline's, the worse ones first; none without a baseline.

    Against a report or a file of expectations a better verdict is a surprise too. Against the catalogue it is one where
    the failure is certain: a race may be won, and what a path or a model of the user's own does is not known. A case
    that cannot be built here, or was skipped because its scenario had failed before, ran nothing: it is neither
    foretold nor unforeseen.
    """
    match baseline:
        case None:
            return []
        case "known":
            found = [(result, _unforeseen(result, context)) for result in report.results]
            ordered = sorted(found, key=lambda pair: not pair[0].verdict.bad)
            return [sentence for _, sentence in ordered if sentence]
        case Report():
            return _unlike(report, baseline)
        case ExpectedFailures():
            return unexpected(report, baseline, context.torch)
        case _:
            assert_never(baseline)


def as_expected(report: Report, baseline: Baseline, context: RunContext) -> frozenset[str]:
    """The ids of the bad cases that the baseline has, too."""
    match baseline:
        case None:
            return frozenset()
        case "known":
            return frozenset(result.id for result in report.bad if not _unforeseen(result, context))
        case Report():
            kind_of = {result.id: result.verdict.kind for result in baseline.results}
            return frozenset(result.id for result in report.bad if kind_of.get(result.id) == result.verdict.kind)
        case ExpectedFailures():
            expected = {result.id: baseline.of(result.id, context.torch) for result in report.bad}
            return frozenset(
                result.id for result in report.bad if (one := expected[result.id]) is not None and one.met_by(result)
            )
        case _:
            assert_never(baseline)


def conclusion(report: Report, surprises: Sequence[str], context: RunContext) -> str:
    """The last line of a run that was held against the catalogue."""
    ran = [result for result in report.results if result.verdict.kind not in NOT_RUN]
    as_foretold = [result for result in ran if not _unforeseen(result, context)]
    num_ok, num_refused = (sum(r.verdict.kind == kind for r in as_foretold) for kind in ("ok", "refused"))
    parts = [f"{num_ok} ok", *([f"{num_refused} refused"] if num_refused else [])]
    parts += [f"{len(as_foretold) - num_ok - num_refused} as torch {_short(context.torch)} is known to fail"]
    num_not_run = len(report.results) - len(ran)
    parts += [f"{num_not_run} not run"] if num_not_run else []
    return f"{counted(len(report.results), 'case')}: {', '.join(parts)}, {len(surprises)} unforeseen"


def exit_code(report: Report, baseline: Baseline, surprises: Sequence[str]) -> int:
    """0 or 1 as errors.py and the README say.

    Raises DoctorFault where a case has no result, CannotRun where nothing could be run, unless a report expected that.
    """
    if lost := report.of_kind("lost"):
        raise DoctorFault(f"{counted(lost, 'case')} without a result, which is the doctor's own fault")
    if surprises or (baseline is None and report.bad):
        return EXIT_BAD_VERDICT
    if not isinstance(baseline, Report) and all(result.verdict.kind in NOT_RUN for result in report.results):
        raise CannotRun("none of the selected cases could be run here; the reason is given with each case")
    return EXIT_OK


def _unforeseen(result: CaseResult, context: RunContext) -> str:
    """What is not as the catalogue foretells; empty where all is."""
    verdict = result.verdict
    if verdict.kind in NOT_RUN:
        return ""
    outcomes = catalogue.expected_outcomes(result.case, context)
    if any(_is(result, outcome) for outcome in outcomes):
        return ""
    foretold = " or ".join("ok" if entry is None else f"{entry.verdict} ({entry.id})" for entry in outcomes)
    if not verdict.bad:
        return f"foretold and not seen: {result.id} is {verdict.kind}, not {foretold}"
    recognized = f" ({result.known})" if result.known else ""
    return f"unforeseen: {result.id} is {verdict.kind}{recognized}, not {foretold}: {verdict.reason}"


def _is(result: CaseResult, outcome: KnownFailure | None) -> bool:
    """Whether the case ended so: the same verdict for another reason is another failure."""
    if outcome is None:
        return result.verdict.kind in GOOD
    return (result.verdict.kind, result.known) == (outcome.verdict, outcome.id)


def _unlike(report: Report, expected: Report) -> list[str]:
    """Which verdicts are not the expected report's, in which a case that it does not have is ok or refused."""
    kind_of = {result.id: result.verdict.kind for result in expected.results}
    found = [(result, kind_of.get(result.id, "ok")) for result in report.results]
    other = [
        (result, wanted)
        for result, wanted in found
        if result.verdict.kind != wanted and (result.id in kind_of or result.verdict.kind not in GOOD)
    ]
    ordered = sorted(other, key=lambda pair: not pair[0].verdict.bad)
    return [f"expected {wanted}, got {result.verdict.kind}: {result.id}" for result, wanted in ordered]


def _short(torch: str) -> str:
    """A version's first two numbers."""
    try:
        version = Version(torch)
    except InvalidVersion:
        return torch
    return f"{version.major}.{version.minor}"
