"""Groups the bad cases of a report: cases that fail in the same way are one group."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_doctor.known import catalogue
from fsdp_doctor.known.catalogue import KnownFailure
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.verdict.classification import VerdictKind, fold, strip_seconds

# Matches the names of entries in a reason, and the list at the end of some of torch's messages.
_NAMES = re.compile(r": [\w.]+\.[\w.]+(, [\w.]+)*( and \d+ more)?(?=;|$)|: \[\(.*$", re.DOTALL)
_RANKS = re.compile(r"^ranks? [\d, ]+: ")
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")
# Verdicts whose reasons contain counts and values, which are ignored. A number in the message of an exception is kept,
# because two different exceptions may differ only in a number.
_WITH_VALUES: frozenset[str] = frozenset({"wrong", "race", "incomplete", "misplaced", "leak", "order", "oom"})
_VALUE = re.compile(r"(?<![\w.])-?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|inf|True|False)(?![\w])")
_SHAPE = re.compile(r"\(#(?:, #)*,?\)")


@dataclass(frozen=True, kw_only=True)
class FailureGroup:
    """Bad cases that share the verdict, the kind of reason and the catalogue's entry.

    reason, also: the shortened texts of the first case's verdict.
    """

    number: int
    kind: VerdictKind
    reason: str
    also: tuple[str, ...]
    results: tuple[CaseResult, ...]

    @property
    def known(self) -> KnownFailure | None:
        """The catalogue's entry; None if there is no entry, or if only another version of fsdp-doctor has the entry."""
        return next((entry for entry in catalogue.read_catalogue() if entry.id == self.results[0].known), None)

    @property
    def traceback(self) -> str:
        failure = self.results[0].failure
        return failure.traceback if failure is not None else ""

    @property
    def stacks(self) -> list[tuple[int, str]]:
        """(rank, Python stacks) for every rank that was stopped."""
        return [(report.rank, report.stack) for report in self.results[0].ranks if report.stack]


def group_failures(report: Report) -> list[FailureGroup]:
    """Groups the bad results. Groups that the catalogue does not know come first, then the largest groups."""
    groups: dict[tuple[VerdictKind, tuple[str, ...], str], list[CaseResult]] = {}
    for result in report.bad:
        kind = result.verdict.kind
        groups.setdefault((kind, _split_problems(result.verdict.reason, kind), result.known), []).append(result)
    ordered = sorted(groups.items(), key=lambda item: (item[0][2] != "", -len(item[1])))
    failures = []
    for number, (_, results) in enumerate(ordered, start=1):
        verdict = results[0].verdict
        also = (text.partition(": ") for text in verdict.also)
        failures.append(
            FailureGroup(
                number=number,
                kind=verdict.kind,
                reason=_shorten(verdict.reason, verdict.kind),
                also=tuple(kind + colon + _shorten(reason, kind) for kind, colon, reason in also),
                results=tuple(results),
            )
        )
    return failures


def number_failures(failures: Sequence[FailureGroup]) -> dict[str, int]:
    """Maps the id of each bad case to the number of its group."""
    return {result.id: failure.number for failure in failures for result in failure.results}


def _shorten(reason: str, kind: str) -> str:
    """Shortens a reason: keeps the first entry of each kind of problem, and counts the other entries."""
    if kind not in _WITH_VALUES:
        return reason
    alike: dict[str, list[str]] = {}
    for problem in reason.split("; "):
        alike.setdefault(_remove_values(problem), []).append(problem)
    return "; ".join(
        problems[0] + (f", and {len(problems) - 1} more like it" if len(problems) > 1 else "")
        for problems in alike.values()
    )


def _split_problems(reason: str, kind: VerdictKind) -> tuple[str, ...]:
    """Returns the problems of a reason without the parts that differ between equal failures.

    Equal failures can occur on different ranks, in different models and in different runs.
    """
    if kind not in _WITH_VALUES:
        return (_fold(reason),)
    return tuple(sorted({_remove_values(problem) for problem in reason.split("; ")}))


def _remove_values(problem: str) -> str:
    return _SHAPE.sub("(#)", _VALUE.sub("#", _fold(problem)))


def _fold(text: str) -> str:
    """Removes ranks, indices of devices, addresses, seconds and names from ``text``."""
    return _NAMES.sub("", _RANKS.sub("", _ADDRESS.sub("0x", strip_seconds(fold(text)))))
