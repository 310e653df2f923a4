"""The report as typed records, and its JSON form. Every format is made only from these records."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fsdp_doctor.examination.memory_records import StageMemory
from fsdp_doctor.known import catalogue
from fsdp_doctor.known.catalogue import BrokenCase
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.machine.environment import EnvironmentFacts
from fsdp_doctor.matrix.cases import AnyCase, make_any_case
from fsdp_doctor.matrix.frameworks.framework_matrix import ShimKind
from fsdp_doctor.verdict.classification import Verdict, VerdictKind
from fsdp_doctor.verdict.records import Failure, RankReport

SCHEMA = "fsdp-doctor/report"
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The result of one case. A bad verdict comes with the report of every rank.

    id, scenario, method: identify the case.
    seconds: the slowest rank's time inside the method.
    peak_extra_bytes: the extra device memory of the rank that needed most.
    wall_seconds: the time that the whole case took, with building and checking.
    yielded: for each rank, the number of entries of each form, dtype and kind of device; empty if the method did not
        finish.
    known: the id of the catalogue's entry for a bad verdict; empty if no entry matches.
    confirmation: the verdict of the second run in new workers, with --confirm.
    ledgers: the memory of each rank at each stage, with --memory.
    """

    id: str
    scenario: dict[str, str]
    method: str
    verdict: Verdict
    seconds: float | None = None
    peak_extra_bytes: int | None = None
    wall_seconds: float = 0.0
    yielded: tuple[dict[str, int], ...] = ()
    known: str = ""
    confirmation: Verdict | None = None
    ledgers: tuple[StageMemory, ...] = ()
    ranks: tuple[RankReport, ...] = ()

    @functools.cached_property
    def case(self) -> AnyCase:
        """The case that ran. Raises KeyError or ValueError for a scenario that this version does not have."""
        return make_any_case(self.scenario, self.method)

    @property
    def confirmed(self) -> bool | None:
        """Returns whether the second run gave the same verdict; None without a second run."""
        return None if self.confirmation is None else self.confirmation.kind == self.verdict.kind

    @property
    def failure(self) -> Failure | None:
        """The exception of the first rank that the verdict names; if there is none, the exception of any other rank."""
        named_first = sorted(self.ranks, key=lambda report: report.rank not in self.verdict.ranks)
        failures = (report.record.failure for report in named_first if report.record is not None)
        return next((failure for failure in failures if failure is not None), None)


@dataclass(frozen=True, kw_only=True)
class AppliedShim:
    """A change to a framework's worker, without which the framework would not find the emulated device.

    name: ``module:qualified.name`` of a function, or the name of a variable, a plug-in or a stand-in.
    """

    framework: str
    name: str
    kind: ShimKind
    reason: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run and its results. During the run, FILE.journal has further results, one on each line.

    version: the version of fsdp-doctor.
    created: the time in ISO 8601.
    device: the type of the device under test.
    num_selected: the number of selected cases.
    rerun_options: the options that a command needs besides ``--case`` to run one case alone.
    late_completion: whether non-blocking copies of the emulated device finished as late as possible.
    notes: sentences that a reader needs in order not to misread the verdicts.
    shims: changes to frameworks on the emulated device.
    complete: whether every selected case has a result.
    ended: the reason why an incomplete run ended.
    """

    version: str
    created: str
    command: str
    device: str
    world_size: int
    num_selected: int
    environment: EnvironmentFacts
    rerun_options: str = ""
    late_completion: bool = True
    notes: tuple[str, ...] = ()
    shims: tuple[AppliedShim, ...] = ()
    complete: bool = False
    ended: str = ""
    seconds: float = 0.0
    results: tuple[CaseResult, ...] = ()

    @property
    def bad(self) -> list[CaseResult]:
        return [result for result in self.results if result.verdict.bad]

    @property
    def packages(self) -> dict[str, str]:
        """Maps packages to their versions."""
        return self.environment.get("packages", {})

    def count_kind(self, kind: VerdictKind) -> int:
        """Counts the cases with this verdict."""
        return sum(result.verdict.kind == kind for result in self.results)


def make_result(
    case: AnyCase, verdict: Verdict, reports: Sequence[RankReport] = (), wall_seconds: float = 0.0
) -> CaseResult:
    """Makes the result of a case from the reports of all ranks. Keeps the reports themselves only for a bad verdict."""
    records = [report.record for report in reports if report.record is not None]
    seconds = [record.seconds for record in records if record.seconds is not None]
    peaks = [record.peak_extra_bytes for record in records if record.peak_extra_bytes is not None]
    return CaseResult(
        **make_case_fields(case),
        verdict=verdict,
        seconds=max(seconds, default=None),
        peak_extra_bytes=max(peaks, default=None),
        wall_seconds=round(wall_seconds, 4),
        yielded=tuple(report.record.yielded if report.record is not None else {} for report in reports),
        ledgers=tuple(memory for record in records for memory in record.ledgers),
        ranks=tuple(map(_remove_memory, reports)) if verdict.bad else (),
    )


def make_case_fields(case: AnyCase) -> dict[str, Any]:
    """Returns the fields of a result that identify its case."""
    return {"id": case.id, "scenario": case.scenario.to_json(), "method": case.method}


def _remove_memory(report: RankReport) -> RankReport:
    """Removes the ledgers from a rank's report, because the result has them already."""
    if report.record is None:
        return report
    return dataclasses.replace(report, record=dataclasses.replace(report.record, ledgers=()))


def make_context(report: Report) -> RunContext:
    """Returns the facts about the run that decide which entries of the catalogue apply."""
    return RunContext(
        torch=report.packages.get("torch", ""),
        device=report.device,
        world_size=report.world_size,
        late_completion=report.late_completion,
        packages=report.packages,
    )


def recognize_failure(result: CaseResult, context: RunContext) -> CaseResult:
    """Returns the result with the id of the catalogue's entry that describes its failure."""
    verdict = result.verdict
    if not verdict.bad:
        return result
    failures = [r.record.failure for r in result.ranks if r.record is not None and r.record.failure is not None]
    symptoms = BrokenCase(
        kind=verdict.kind,
        reasons=(verdict.reason, *verdict.also),
        messages=tuple(dict.fromkeys(f"{failure.type}: {failure.message}" for failure in failures)),
        traceback="\n".join(failure.traceback for failure in failures[:1]),
    )
    entry = catalogue.find_shown_entry(result.case, symptoms, context)
    return dataclasses.replace(result, known=entry.id if entry is not None else "")


def convert_report_to_dict(report: Report) -> dict[str, Any]:
    return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **msgspec.to_builtins(report)}


def read_report_dict(data: dict[str, Any]) -> Report:
    """Reads a report from JSON values. Raises KeyError, TypeError or ValueError for other values."""
    report = msgspec.convert({**data, "results": ()}, Report)
    return dataclasses.replace(report, results=tuple(map(read_result_dict, data["results"])))


def read_result_dict(data: dict[str, Any]) -> CaseResult:
    """Reads one result of a report from JSON values. Raises the same errors as :func:`read_report_dict`."""
    result = msgspec.convert(data, CaseResult)
    # Reading the property checks the scenario's values.
    assert result.case
    return result
