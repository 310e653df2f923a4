"""Compares the verdicts of a run with the expected verdicts, and decides the exit code."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

from packaging.version import InvalidVersion, Version
from typing_extensions import assert_never

from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, CannotRun, DoctorFault
from fsdp_doctor.known import catalogue
from fsdp_doctor.known.catalogue import KnownFailure
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.matrix.cases import list_frameworks
from fsdp_doctor.matrix.frameworks.framework_matrix import read_matrix
from fsdp_doctor.report.document import CaseResult, Report, make_context
from fsdp_doctor.report.expected_failures import ExpectedFailures, describe_difference, list_stale
from fsdp_doctor.text import format_count
from fsdp_doctor.verdict.classification import GOOD, NOT_RUN

Baseline: TypeAlias = Report | ExpectedFailures | Literal["known", "nothing bad"]
"""Expected verdicts: a report's; the failures in a file; the failures that the catalogue expects; or no failures."""


@dataclass(frozen=True)
class Judgement:
    """A report, compared with a baseline of expected verdicts.

    If the baseline is a report or a file, a better verdict than expected is unexpected too. If the baseline is the
    catalogue, a better verdict is unexpected only if the failure is certain: a race may happen not to occur, and the
    catalogue does not know the user's own methods and models. A case that did not run, because it cannot be built here
    or its scenario failed before, is never unexpected.
    """

    report: Report
    baseline: Baseline

    @functools.cached_property
    def context(self) -> RunContext:
        return make_context(self.report)

    @functools.cached_property
    def differences(self) -> dict[str, str]:
        """Maps the id of each case that differs from its expectation to a sentence about it, bad cases first."""
        ordered = sorted(self.report.results, key=lambda result: not result.verdict.bad)
        return {result.id: sentence for result in ordered if (sentence := self._describe_difference(result))}

    @functools.cached_property
    def unexpected(self) -> list[str]:
        """The sentences of the differences, and a sentence for each expectation of a file that is stale.

        An expectation is stale if none of its cases fails as expected, or if its patterns match no case.
        """
        stale = (
            list_stale(self.report, self.baseline, self.context.torch)
            if isinstance(self.baseline, ExpectedFailures)
            else ()
        )
        return [*self.differences.values(), *stale]

    @property
    def expected_failures(self) -> frozenset[str]:
        """The ids of the bad cases that were expected to be bad."""
        return frozenset(result.id for result in self.report.bad if result.id not in self.differences)

    @property
    def conclusion(self) -> str:
        """The result of the run in one line."""
        usual = [result for result in self.report.results if result.id not in self.differences]
        counts = Counter(_name_count(result) for result in usual)
        parts = [f"{counts['ok']} ok", *([f"{counts['refused']} refused"] if counts["refused"] else [])]
        match self.baseline:
            case "known":
                parts += [f"{counts['bad']} as {self._name_subject()} known to fail"]
            case "nothing bad":
                pass
            case _:
                parts += [f"{counts['bad']} bad as expected"]
        parts += [f"{counts['not run']} not run"] if counts["not run"] else []
        parts += [f"{len(self.unexpected)} {'bad' if self.baseline == 'nothing bad' else 'unexpected'}"]
        return f"{format_count(len(self.report.results), 'case')}: {', '.join(parts)}"

    def _name_subject(self) -> str:
        """Returns the subject and verb for the sentence about known failures: torch or the frameworks that were run."""
        matrices = [read_matrix(name) for name in list_frameworks(result.case for result in self.report.results)]
        packages = dict.fromkeys(matrix.distributions[0] for matrix in matrices)
        names = [f"{package} {self.report.packages.get(package, '')}".strip() for package in packages]
        if len(names) > 1:
            return f"{', '.join(names[:-1])} and {names[-1]} are"
        return f"{names[0] if names else f'torch {_shorten_version(self.context.torch)}'} is"

    def choose_exit_code(self) -> int:
        """Returns EXIT_OK or EXIT_BAD_VERDICT.

        Raises DoctorFault if a case has no result, and CannotRun if no case could be run and no report was given as the
        baseline.
        """
        if lost := self.report.count_kind("lost"):
            raise DoctorFault(f"{format_count(lost, 'case')} without a result, which is the doctor's own fault")
        if self.unexpected:
            return EXIT_BAD_VERDICT
        nothing_ran = all(result.verdict.kind in NOT_RUN for result in self.report.results)
        if nothing_ran and not isinstance(self.baseline, Report):
            raise CannotRun("none of the selected cases could be run here; the reason is given with each case")
        return EXIT_OK

    def _describe_difference(self, result: CaseResult) -> str:
        """Returns the sentence for a verdict that differs from the expectation; empty if it does not differ."""
        match self.baseline:
            case "nothing bad":
                return f"{result.id} is {result.verdict.kind}: {result.verdict.reason}" if result.verdict.bad else ""
            case "known":
                return _compare_with_catalogue(result, self.context)
            case Report():
                # A case that the expected report lacks should be ok or refused.
                kind, wanted = result.verdict.kind, self._kinds.get(result.id, "ok")
                differs = kind != wanted and (result.id in self._kinds or kind not in GOOD)
                return f"expected {wanted}, got {kind}: {result.id}" if differs else ""
            case ExpectedFailures():
                return describe_difference(result, self.baseline.find(result.id, self.context.torch))
            case _:
                assert_never(self.baseline)

    @functools.cached_property
    def _kinds(self) -> dict[str, str]:
        """Maps the ids of the expected report's cases to their verdicts."""
        assert isinstance(self.baseline, Report)
        return {result.id: result.verdict.kind for result in self.baseline.results}


def _name_count(result: CaseResult) -> Literal["ok", "refused", "bad", "not run"]:
    """Returns the word under which the conclusion counts a case."""
    kind = result.verdict.kind
    if kind in NOT_RUN:
        return "not run"
    if kind not in GOOD:
        return "bad"
    return "refused" if kind == "refused" else "ok"


def _compare_with_catalogue(result: CaseResult, context: RunContext) -> str:
    verdict = result.verdict
    if verdict.kind in NOT_RUN:
        return ""
    outcomes = catalogue.list_expected_outcomes(result.case, context)
    if any(_has_ended_as(result, outcome) for outcome in outcomes):
        return ""
    expected = " or ".join("ok" if entry is None else f"{entry.verdict} ({entry.id})" for entry in outcomes)
    if not verdict.bad:
        return f"expected and not seen: {result.id} is {verdict.kind}, not {expected}"
    recognized = f" ({result.known})" if result.known else ""
    return f"unexpected: {result.id} is {verdict.kind}{recognized}, not {expected}: {verdict.reason}"


def _has_ended_as(result: CaseResult, outcome: KnownFailure | None) -> bool:
    """Returns whether the case ended as expected. The same verdict for another reason is another failure."""
    if outcome is None:
        return result.verdict.kind in GOOD
    return outcome.shows_as(result.verdict.kind) and result.known == outcome.id


def _shorten_version(torch: str) -> str:
    try:
        version = Version(torch)
    except InvalidVersion:
        return torch
    return f"{version.major}.{version.minor}"
