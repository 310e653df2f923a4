"""What a project expects to fail, as a short TOML that people read and review, and what of it a run does not show."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from packaging.version import InvalidVersion, Version

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.expectation_patterns import compiled_pattern, matches_case
from fsdp_doctor.report.layout import printable
from fsdp_doctor.verdict.classification import GOOD, NOT_RUN, VerdictKind, fold, without_seconds

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLE = "expect"
_DEVICE = re.compile(r"\b(?:cuda|xpu|hpu|npu|emulated|cpu)\b")


@dataclass(frozen=True, kw_only=True)
class ExpectedFailure:
    """Cases and what they are expected to show.

    cases: patterns of their ids. reason: words that the verdict's reason has in it, on any device; empty for any.
    link: where it is discussed. until: the first version of torch that is expected not to show it; empty for none.
    """

    cases: tuple[str, ...]
    verdict: VerdictKind
    reason: str = ""
    link: str = ""
    until: str = ""

    def covers(self, case_id: str) -> bool:
        return any(matches_case(pattern, case_id) for pattern in self.cases)

    def met_by(self, result: CaseResult) -> bool:
        """Whether the case shows it."""
        verdict = result.verdict
        said = (verdict.reason, *verdict.also)
        return verdict.kind == self.verdict and any(comparable(self.reason) in comparable(text) for text in said)

    def is_over(self, torch: str) -> bool:
        """Whether that version of torch is expected not to show it any more."""
        try:
            return bool(self.until) and Version(torch).release >= Version(self.until).release
        except InvalidVersion:
            return False

    @property
    def title(self) -> str:
        """As a message names it."""
        return f"{self.verdict} of {self.cases[0]}{' and others' if len(self.cases) > 1 else ''}"


@dataclass(frozen=True)
class ExpectedFailures:
    """Those of a file. The first that covers a case says what is expected of it; what none covers is not to be bad."""

    entries: tuple[ExpectedFailure, ...]

    def of(self, case_id: str, torch: str) -> ExpectedFailure | None:
        """What holds for a case on that version of torch."""
        return next((one for one in self.entries if one.covers(case_id) and not one.is_over(torch)), None)


def unexpected(report: Report, expected: ExpectedFailures, torch: str) -> list[str]:
    """A sentence for each result that is not as expected, the worse ones first, and for each stale expectation."""
    found = [(result, expected.of(result.id, torch)) for result in report.results]
    other = [(result, one) for result, one in found if not _as_expected(result, one)]
    ordered = sorted(other, key=lambda pair: not pair[0].verdict.bad)
    return [*(_sentence(result, one) for result, one in ordered), *_stale(report, expected, torch)]


def comparable(text: str) -> str:
    """``text`` without what differs between equal reasons, the device, its index and seconds, and as it is printed."""
    return _DEVICE.sub("device", without_seconds(fold(" ".join(printable(text).split()))))


def _as_expected(result: CaseResult, expected: ExpectedFailure | None) -> bool:
    """A case that could not run here shows nothing, and that a stale expectation is told of it elsewhere."""
    if result.verdict.kind in NOT_RUN:
        return True
    return result.verdict.kind in GOOD if expected is None else expected.met_by(result)


def _sentence(result: CaseResult, expected: ExpectedFailure | None) -> str:
    got = f"got {result.verdict.kind}: {result.id}"
    if expected is None:
        return f"expected ok, {got}: {result.verdict.reason}"
    if result.verdict.kind == expected.verdict:
        return (
            f"expected {expected.verdict} with {expected.reason!r}, {got} with another reason: {result.verdict.reason}"
        )
    return f"expected {expected.verdict}, {got}"


def _stale(report: Report, expected: ExpectedFailures, torch: str) -> Iterator[str]:
    """Expectations that cases which ran do not meet, and patterns that are of no case that there is."""
    ran = [result for result in report.results if result.verdict.kind not in {*NOT_RUN, "lost"}]
    names = (*(result.id for result in report.results), *_known_ids())
    by_entry: dict[ExpectedFailure, list[CaseResult]] = {}
    for result in ran:
        if (entry := expected.of(result.id, torch)) is not None:
            by_entry.setdefault(entry, []).append(result)
    for entry in expected.entries:
        if entry.is_over(torch):
            continue
        covered = by_entry.get(entry, [])
        if covered and not any(entry.met_by(result) for result in covered):
            yield f"stale: no case shows the {entry.title} any more; remove the expectation, or give it an until"
        elif not covered and not any(map(entry.covers, names)):
            yield f"stale: there is no case {' or '.join(entry.cases)}; remove the expectation, or correct its pattern"


@functools.cache
def _known_ids() -> tuple[str, ...]:
    """Of every case of ours."""
    return tuple(case.id for case in select(Selection(level="full", fix=True)))


def read_expected_failures(path: pathlib.Path) -> ExpectedFailures:
    """Raises UsageError, in a sentence that names the table, for anything but such a file."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"cannot read the expectations {path}: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    tables = data.get(_TABLE, [])
    if set(data) - {_TABLE} or not isinstance(tables, list):
        raise UsageError(f"{path}: expectations are tables [[{_TABLE}]], and there is nothing else in the file")
    return ExpectedFailures(tuple(_entry(table, f"{path}, expectation {n}") for n, table in enumerate(tables, start=1)))


def _entry(table: Any, where: str) -> ExpectedFailure:
    fields = {field.name for field in dataclasses.fields(ExpectedFailure)}
    if not isinstance(table, dict) or (set(table) - fields):
        odd = sorted(set(table) - fields) if isinstance(table, dict) else [str(table)]
        raise UsageError(f"{where}: unknown key {odd[0]!r}; use {', '.join(sorted(fields))}")
    cases = table.get("cases")
    if not isinstance(cases, list) or not cases or not all(isinstance(pattern, str) for pattern in cases):
        raise UsageError(f"{where}: cases must be a list of patterns of case ids")
    texts = {name: table.get(name, "") for name in fields - {"cases"}}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UsageError(f"{where}: {name} must be a string")
    if texts["verdict"] not in get_args(VerdictKind):
        raise UsageError(f"{where}: verdict {texts['verdict']!r} is none of {', '.join(get_args(VerdictKind))}")
    _check_patterns_and_version(cases, texts["until"], where)
    return ExpectedFailure(cases=tuple(cases), **texts)


def _check_patterns_and_version(patterns: Sequence[str], until: str, where: str) -> None:
    try:
        for pattern in patterns:
            compiled_pattern(pattern)
        if until:
            Version(until)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except InvalidVersion:
        raise UsageError(f"{where}: until {until!r} is not a version of torch") from None
