"""What the formats for people share: the matrix cut into grids, and the distinct failures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_doctor.known import catalogue
from fsdp_doctor.known.catalogue import KnownFailure
from fsdp_doctor.matrix.axes import AXES, AXIS
from fsdp_doctor.matrix.cases import Scenario
from fsdp_doctor.matrix.paths import FIX, PATH_NAMES
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.verdict.classification import NEUTRAL, VerdictKind, fold

# XML 1.0 has no way to write these, and what a worker raised or printed can hold them.
_NOT_PRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# The names that verification found, and the list at the end of some of torch's messages.
_NAMES = re.compile(r": [\w.]+\.[\w.]+(, [\w.]+)*( and \d+ more)?(?=;|$)|: \[\(.*$", re.DOTALL)
_RANKS = re.compile(r"^ranks? [\d, ]+: ")


@dataclass(frozen=True, kw_only=True)
class FailureGroup:
    """Bad cases that share verdict, reason and what is known of it, device indices and ranks aside."""

    number: int
    kind: VerdictKind
    reason: str
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


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A rectangle of the matrix: paths down, offloads across, everything else in the title."""

    title: str
    paths: tuple[str, ...]
    offloads: tuple[str, ...]
    cells: dict[tuple[str, str], CaseResult]

    @property
    def uniform(self) -> CaseResult | None:
        """A result that stands for all, where every cell has one neutral verdict and one reason."""
        kinds = {(result.verdict.kind, result.verdict.reason) for result in self.cells.values()}
        first = next(iter(self.cells.values()))
        neutral = first.verdict.kind in NEUTRAL and first.verdict.kind != "ok"
        return first if neutral and len(kinds) == 1 else None


def grids(report: Report) -> list[Grid]:
    """All results, in the order of the run."""
    grouped: dict[Scenario, dict[tuple[str, str], CaseResult]] = {}
    for result in report.results:
        scenario = result.case.scenario
        group = scenario.changed(offload=AXIS["offload"].default)
        grouped.setdefault(group, {})[result.case.path, scenario.offload] = result
    return [
        Grid(
            title=_title(group),
            paths=_ordered((path for path, _ in cells), PATH_NAMES),
            offloads=_ordered((offload for _, offload in cells), tuple(AXIS["offload"].values)),
            cells=cells,
        )
        for group, cells in grouped.items()
    ]


def distinct_failures(report: Report) -> list[FailureGroup]:
    """The bad results, grouped, the most frequent first."""
    groups: dict[tuple[VerdictKind, str, str], list[CaseResult]] = {}
    for result in report.bad:
        sort = (result.verdict.kind, _sort_of(result.verdict.reason), result.known)
        groups.setdefault(sort, []).append(result)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [
        FailureGroup(number=number, kind=kind, reason=results[0].verdict.reason, results=tuple(results))
        for number, ((kind, _, _), results) in enumerate(ordered, start=1)
    ]


def _sort_of(reason: str) -> str:
    """A reason without what differs between models and ranks: the ranks, the devices, the names."""
    return _NAMES.sub("", _RANKS.sub("", fold(reason)))


def numbers(failures: Sequence[FailureGroup]) -> dict[str, int]:
    """The number of the failure that each bad case belongs to, by case id."""
    return {result.id: failure.number for failure in failures for result in failure.results}


def fixes(report: Report) -> dict[Scenario, CaseResult]:
    """What the fix did in each scenario, where it ran."""
    return {result.case.scenario: result for result in report.results if result.case.path == FIX}


def summary(report: Report) -> str:
    """One line: how many cases, and how many of each verdict."""
    kinds = Counter(result.verdict.kind for result in report.results)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    partial = (
        "" if report.complete else f" of {report.num_selected} selected (incomplete: {report.ended or 'still running'})"
    )
    return (
        f"{len(report.results)} cases{partial} on {report.world_size} ranks of {report.device}: {counts or 'no result'}"
    )


def rerun_command(report: Report, result: CaseResult) -> str:
    """The command that runs one case alone."""
    options = f" {report.rerun_options}" if report.rerun_options else ""
    return f"fsdp-doctor probe{options} --case '{result.id}'"


def seconds_text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.4f} s"


def bytes_text(number: int | None) -> str:
    """A size in the unit that keeps it readable; a dash where it was not measured."""
    if number is None:
        return "-"
    size = float(number)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def main_thread(stack: str) -> list[str]:
    """The lines of the worker's main thread out of all threads' stacks, innermost frame first."""
    return ("Current thread" + stack.split("Current thread", 1)[-1].split("\nThread", 1)[0]).strip().splitlines()


def printable(text: str) -> str:
    """``text`` without the characters that XML and most terminals cannot show; lone surrogates among them."""
    return _NOT_PRINTABLE.sub("?", text)


def _title(group: Scenario) -> str:
    return ", ".join(
        value
        for axis in AXES
        if axis.name != "offload" and ((value := getattr(group, axis.name)) != axis.default or axis.always_in_id)
    )


def _ordered(present: Iterable[str], order: tuple[str, ...]) -> tuple[str, ...]:
    """In table order; what the table does not have (a user's path) at the end."""
    found = dict.fromkeys(present)
    known = [name for name in order if name in found]
    return tuple(known + [name for name in found if name not in order])
