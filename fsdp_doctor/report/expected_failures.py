"""Reads the failures that a project expects from a short, reviewable TOML file, and compares them with a report."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Annotated, get_args

import msgspec
from packaging.version import InvalidVersion, Version

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.text import make_printable
from fsdp_doctor.verdict.classification import GOOD, NOT_RUN, VerdictKind, fold, strip_seconds

_DEVICE = re.compile(r"\b(?:cuda|xpu|hpu|npu|emulated|cpu)\b")
_PIECE = re.compile(r"\*|\{[^{}]*\}|[^*{}]+")


class ExpectedFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cases, and the failure that they are expected to show.

    cases: patterns of ids, for example ``fsdp2/policy*/staged/{state_dict,dcp}``, in which ``*`` is any text and
        ``{a,b}`` is one of several.
    reason: words that the verdict's reason contains, on any device; empty for any reason.
    link: a link to the discussion.
    until: the first version of torch that is expected not to fail; empty if no version is.
    """

    cases: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    verdict: VerdictKind
    reason: str = ""
    link: str = ""
    until: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid pattern or version."""
        for pattern in self.cases:
            compile_pattern(pattern)
        if self.until:
            Version(self.until)

    def covers(self, case_id: str) -> bool:
        return any(compile_pattern(pattern).fullmatch(case_id) for pattern in self.cases)

    def is_met_by(self, result: CaseResult) -> bool:
        """Returns whether the case fails as expected."""
        verdict = result.verdict
        reasons = (verdict.reason, *verdict.also)
        return verdict.kind == self.verdict and any(
            make_comparable(self.reason) in make_comparable(text) for text in reasons
        )

    def is_over(self, torch: str) -> bool:
        """Returns whether this version of torch is expected not to fail, because it is ``until`` or later."""
        try:
            return bool(self.until) and Version(torch).release >= Version(self.until).release
        except InvalidVersion:
            return False


class ExpectedFailures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The expectations of a file. The first match for a case counts; a case without a match is expected to be ok."""

    entries: tuple[ExpectedFailure, ...] = msgspec.field(name="expect", default=())

    def find(self, case_id: str, torch: str) -> ExpectedFailure | None:
        """Finds the expectation for a case on a version of torch; None if the case is expected to be ok."""
        return next((entry for entry in self.entries if entry.covers(case_id) and not entry.is_over(torch)), None)


def read_expected_failures(path: pathlib.Path) -> ExpectedFailures:
    """Reads a file of expectations. Raises UsageError with the place in the file if it is not valid."""
    try:
        return msgspec.toml.decode(path.read_text(encoding="utf-8"), type=ExpectedFailures)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"cannot read the expectations {path}: {reason}") from None
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{path}: {error}; each table [[expect]] has cases, a list of patterns, and a verdict "
            f"({', '.join(get_args(VerdictKind))}), and may have a reason, a link and until, a version of torch"
        ) from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None


@functools.lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern of case ids. Raises ValueError if it is empty or has an unmatched brace."""
    pieces = _PIECE.findall(pattern)
    if not pattern or "".join(pieces) != pattern:
        raise ValueError(f"the pattern {pattern!r} is empty or has an unmatched brace")
    return re.compile("".join(map(_compile_piece, pieces)))


def _compile_piece(piece: str) -> str:
    if piece == "*":
        return ".*"
    if piece[0] == "{":
        return "(?:" + "|".join(re.escape(word) for word in piece[1:-1].split(",")) + ")"
    return re.escape(piece)


def describe_difference(result: CaseResult, expected: ExpectedFailure | None) -> str:
    """Describes the difference between a result and its expectation; empty if they agree or the case did not run."""
    kind, reason = result.verdict.kind, result.verdict.reason
    if kind in NOT_RUN or (kind in GOOD if expected is None else expected.is_met_by(result)):
        return ""
    got = f"got {kind}: {result.id}"
    if expected is None:
        return f"expected ok, {got}: {reason}"
    if kind == expected.verdict:
        return f"expected {expected.verdict} with {expected.reason!r}, {got} with another reason: {reason}"
    return f"expected {expected.verdict}, {got}"


def make_comparable(text: str) -> str:
    """Returns ``text`` in its printed form, without the parts that differ between equal reasons.

    These parts are devices, their indices, and seconds.
    """
    return _DEVICE.sub("device", strip_seconds(fold(" ".join(make_printable(text).split()))))


def list_stale(report: Report, expected: ExpectedFailures, torch: str) -> Iterator[str]:
    """Yields a sentence for each stale expectation, none of whose cases fails as expected, or which matches no case."""
    ids = (*(result.id for result in report.results), *_list_all_ids())
    by_entry: dict[ExpectedFailure, list[CaseResult]] = {}
    for result in report.results:
        if result.verdict.kind not in {*NOT_RUN, "lost"} and (entry := expected.find(result.id, torch)) is not None:
            by_entry.setdefault(entry, []).append(result)
    for entry in expected.entries:
        if entry.is_over(torch):
            continue
        covered = by_entry.get(entry, [])
        if covered and not any(entry.is_met_by(result) for result in covered):
            title = f"{entry.verdict} of {entry.cases[0]}{' and others' if len(entry.cases) > 1 else ''}"
            yield f"stale: no case shows the {title} any more; remove the expectation, or give it an `until`"
        elif not covered and not any(map(entry.covers, ids)):
            yield f"stale: there is no case {' or '.join(entry.cases)}; remove the expectation, or correct its pattern"


@functools.cache
def _list_all_ids() -> tuple[str, ...]:
    """Returns the ids of all cases of the matrix."""
    return tuple(case.id for case in select(Selection(level="full", fix=True)))
