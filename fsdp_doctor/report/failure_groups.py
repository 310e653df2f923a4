"""The distinct failures of a report: bad cases that break alike, told once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_doctor.known import catalogue
from fsdp_doctor.known.catalogue import KnownFailure
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.verdict.classification import VerdictKind, fold, without_seconds

# The names that verification found, and the list at the end of some of torch's messages.
_NAMES = re.compile(r": [\w.]+\.[\w.]+(, [\w.]+)*( and \d+ more)?(?=;|$)|: \[\(.*$", re.DOTALL)
_RANKS = re.compile(r"^ranks? [\d, ]+: ")
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")
# Kinds whose reasons are counts and values. In an exception a number can be all that tells it from another.
_OF_VALUES: frozenset[str] = frozenset({"wrong", "incomplete", "misplaced", "leak", "oom"})
_VALUE = re.compile(r"(?<![\w.])-?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|inf|True|False)(?![\w])")
_SHAPE = re.compile(r"\(#(?:, #)*,?\)")


@dataclass(frozen=True, kw_only=True)
class FailureGroup:
    """Bad cases that share verdict, kind of reason and what is known of it.

    reason, also: the first case's, in short.
    """

    number: int
    kind: VerdictKind
    reason: str
    also: tuple[str, ...]
    results: tuple[CaseResult, ...]

    @property
    def known(self) -> KnownFailure | None:
        """What the catalogue has on it; a report of another version may name an entry that this one does not have."""
        return next((entry for entry in catalogue.known_failures() if entry.id == self.results[0].known), None)

    @property
    def traceback(self) -> str:
        """The traceback of the first rank that the verdict names, or of any that has one."""
        first = self.results[0]
        named = sorted(first.ranks, key=lambda report: report.rank not in first.verdict.ranks)
        for report in named:
            if report.record is not None and report.record.failure is not None:
                return report.record.failure.traceback
        return ""

    @property
    def stacks(self) -> list[tuple[int, str]]:
        """(rank, Python stacks) of every rank that was stopped."""
        return [(report.rank, report.stack) for report in self.results[0].ranks if report.stack]


def distinct_failures(report: Report) -> list[FailureGroup]:
    """The bad results, grouped: what the catalogue does not know first, then the most frequent first."""
    groups: dict[tuple[VerdictKind, tuple[str, ...], str], list[CaseResult]] = {}
    for result in report.bad:
        verdict = result.verdict
        groups.setdefault((verdict.kind, _problems_of(verdict.reason, verdict.kind), result.known), []).append(result)
    ordered = sorted(groups.items(), key=lambda item: (item[0][2] != "", -len(item[1])))
    return [_group(number, results) for number, (_, results) in enumerate(ordered, start=1)]


def numbers(failures: Sequence[FailureGroup]) -> dict[str, int]:
    """The number of the failure that each bad case belongs to, by case id."""
    return {result.id: failure.number for failure in failures for result in failure.results}


def _group(number: int, results: Sequence[CaseResult]) -> FailureGroup:
    verdict = results[0].verdict
    return FailureGroup(
        number=number,
        kind=verdict.kind,
        reason=_in_short(verdict.reason, verdict.kind),
        also=tuple(_also_in_short(text) for text in verdict.also),
        results=tuple(results),
    )


def _in_short(reason: str, kind: str) -> str:
    """``reason`` with each kind of problem told once: of the first entry that has it, and how many more have it."""
    if kind not in _OF_VALUES:
        return reason
    alike: dict[str, list[str]] = {}
    for problem in reason.split("; "):
        alike.setdefault(_without_values(problem), []).append(problem)
    return "; ".join(
        problems[0] + (f", and {len(problems) - 1} more like it" if len(problems) > 1 else "")
        for problems in alike.values()
    )


def _also_in_short(sentence: str) -> str:
    kind, colon, reason = sentence.partition(": ")
    return kind + colon + _in_short(reason, kind)


def _problems_of(reason: str, kind: VerdictKind) -> tuple[str, ...]:
    """What a reason says without what differs between equal failures on other ranks, in other models and runs."""
    if kind not in _OF_VALUES:
        return (_folded(reason),)
    return tuple(sorted({_without_values(problem) for problem in reason.split("; ")}))


def _without_values(problem: str) -> str:
    return _SHAPE.sub("(#)", _VALUE.sub("#", _folded(problem)))


def _folded(text: str) -> str:
    """``text`` without ranks, indices of devices, addresses, seconds and names."""
    return _NAMES.sub("", _RANKS.sub("", _ADDRESS.sub("0x", without_seconds(fold(text)))))
