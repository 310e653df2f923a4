"""The report as values: environment, cases, verdicts. Every format is made from this alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.known import catalogue
from fsdp_doctor.known.catalogue import Found
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.ledgers.ledger import StageLedger, ledger_from_dict
from fsdp_doctor.machine.environment import EnvironmentFacts
from fsdp_doctor.matrix.cases import AnyCase, any_case_of
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkName, ShimKind
from fsdp_doctor.verdict.classification import Verdict, VerdictKind, verdict_of_version_1
from fsdp_doctor.verdict.records import RankReport, rank_report_from_dict, rank_report_to_dict

SCHEMA = "fsdp-doctor/report"
# Since version 2 there is the verdict "refused".
SCHEMA_VERSION = 2
# Keys of a result, or of a rank's record in it, that reports of the first versions do not have.
NOT_IN_OLDER_REPORTS = frozenset(
    {"shims", "yielded", "known", "retire", "refusal", "init", "checkpoint", "ledgers", "call", "precision", "context"}
)


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case: its verdict, its figures, and for a verdict that is not ok every rank's report.

    seconds: the slowest rank's time inside the path. peak_extra_bytes: the largest rank's.
    wall_seconds: everything that the case cost, building and checking included.
    yielded: by rank, how many entries of each form, dtype and kind of device the path yielded; empty where it
        did not get through.
    known: the id of the catalogue's entry that a bad verdict shows; empty where there is none.
    confirmation: the verdict of the second run in fresh workers, with --confirm.
    ledgers: what each rank held at each stage, with --memory.
    """

    case: AnyCase
    verdict: Verdict
    seconds: float | None = None
    peak_extra_bytes: int | None = None
    wall_seconds: float = 0.0
    yielded: tuple[dict[str, int], ...] = ()
    known: str = ""
    confirmation: Verdict | None = None
    ledgers: tuple[StageLedger, ...] = ()
    ranks: tuple[RankReport, ...] = ()

    @property
    def id(self) -> str:
        return self.case.id

    @property
    def confirmed(self) -> bool | None:
        """Whether the second run gave the same verdict; None without one."""
        return None if self.confirmation is None else self.confirmation.kind == self.verdict.kind


@dataclass(frozen=True, kw_only=True)
class AppliedShim:
    """What was changed in the workers of a framework, so that it found the emulated device.

    name: ``module:qualified.name`` of a function, or the name of a variable, a plug-in or a stand-in.
    """

    framework: FrameworkName
    name: str
    kind: ShimKind
    reason: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole run. While it is not complete, more results may stand in FILE.journal, one in each line.

    version: of fsdp-doctor. created: ISO 8601. device: the device type that was tested. num_selected: of cases.
    rerun_options: what a command that runs one case alone needs besides ``--case``.
    notes: what a reader must know to read the verdicts right.
    shims: of frameworks on the emulated device; elsewhere there are none.
    complete: whether every selected case has a result. ended: what ended an incomplete run.
    """

    version: str
    created: str
    command: str
    device: str
    world_size: int
    num_selected: int
    environment: EnvironmentFacts
    rerun_options: str = ""
    notes: tuple[str, ...] = ()
    shims: tuple[AppliedShim, ...] = ()
    complete: bool = False
    ended: str = ""
    seconds: float = 0.0
    results: tuple[CaseResult, ...] = ()

    def of_kind(self, kind: VerdictKind) -> int:
        """How many cases have that verdict."""
        return sum(result.verdict.kind == kind for result in self.results)

    @property
    def bad(self) -> list[CaseResult]:
        return [result for result in self.results if result.verdict.bad]


def result_of(case: AnyCase, verdict: Verdict, reports: list[RankReport], wall_seconds: float) -> CaseResult:
    """Sums up all ranks' reports. The reports themselves are kept where the verdict is not ok."""
    records = [report.record for report in reports if report.record is not None]
    seconds = [record.seconds for record in records if record.seconds is not None]
    peaks = [record.peak_extra_bytes for record in records if record.peak_extra_bytes is not None]
    return CaseResult(
        case=case,
        verdict=verdict,
        seconds=max(seconds, default=None),
        peak_extra_bytes=max(peaks, default=None),
        wall_seconds=round(wall_seconds, 4),
        yielded=tuple(report.record.yielded if report.record is not None else {} for report in reports),
        ledgers=tuple(ledger for record in records for ledger in record.ledgers),
        ranks=tuple(map(_without_ledgers, reports)) if verdict.bad else (),
    )


def _without_ledgers(report: RankReport) -> RankReport:
    """They stand in the result already."""
    if report.record is None:
        return report
    return dataclasses.replace(report, record=dataclasses.replace(report.record, ledgers=()))


def context_of(report: Report) -> RunContext:
    """What the catalogue has to know of the run."""
    return RunContext(
        torch=report.environment.get("packages", {}).get("torch", ""),
        device=report.device,
        world_size=report.world_size,
        late_completion="--no-late-completion" not in report.rerun_options,
        packages=report.environment.get("packages", {}),
    )


def recognized(result: CaseResult, context: RunContext) -> CaseResult:
    """The result with the catalogue's entry for what all ranks say of a case that broke in such a run."""
    verdict = result.verdict
    if not verdict.bad:
        return result
    failures = [r.record.failure for r in result.ranks if r.record is not None and r.record.failure is not None]
    found = Found(
        kind=verdict.kind,
        reasons=(verdict.reason, *verdict.also),
        messages=tuple(dict.fromkeys(f"{failure.type}: {failure.message}" for failure in failures)),
        traceback="\n".join(failure.traceback for failure in failures[:1]),
    )
    entry = catalogue.of_finding(result.case, found, context)
    return dataclasses.replace(result, known=entry.id if entry is not None else "")


def report_to_dict(report: Report) -> dict[str, Any]:
    fields = {
        field.name: getattr(report, field.name) for field in dataclasses.fields(report) if field.name != "results"
    }
    fields["shims"] = [dataclasses.asdict(shim) for shim in report.shims]
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        **fields,
        "results": [result_to_dict(result) for result in report.results],
    }


def report_from_dict(data: dict[str, Any]) -> Report:
    names = {field.name for field in dataclasses.fields(Report)} - {"results", "shims"}
    fields = {name: data[name] for name in names}
    fields["shims"] = tuple(AppliedShim(**shim) for shim in data.get("shims", ()))
    fields["notes"] = tuple(fields["notes"])
    return Report(**fields, results=tuple(result_from_dict(result) for result in data["results"]))


def result_to_dict(result: CaseResult) -> dict[str, Any]:
    return {
        "id": result.id,
        "scenario": result.case.scenario.to_json(),
        "path": result.case.path,
        "verdict": _verdict_to_dict(result.verdict),
        "seconds": result.seconds,
        "peak_extra_bytes": result.peak_extra_bytes,
        "wall_seconds": result.wall_seconds,
        "yielded": list(result.yielded),
        "known": result.known,
        "confirmation": _verdict_to_dict(result.confirmation) if result.confirmation else None,
        "ledgers": [dataclasses.asdict(ledger) for ledger in result.ledgers],
        "ranks": [rank_report_to_dict(report) for report in result.ranks],
    }


def result_from_dict(data: dict[str, Any]) -> CaseResult:
    return CaseResult(
        case=any_case_of(data["scenario"], data["path"]),
        verdict=_verdict_from_dict(data["verdict"]),
        seconds=data["seconds"],
        peak_extra_bytes=data["peak_extra_bytes"],
        wall_seconds=data["wall_seconds"],
        yielded=tuple(data.get("yielded", ())),
        known=data.get("known", ""),
        confirmation=_verdict_from_dict(data["confirmation"]) if data["confirmation"] else None,
        ledgers=tuple(map(ledger_from_dict, data.get("ledgers", ()))),
        ranks=tuple(rank_report_from_dict(report) for report in data["ranks"]),
    )


def _verdict_to_dict(verdict: Verdict) -> dict[str, Any]:
    return dataclasses.asdict(verdict)


def _verdict_from_dict(data: dict[str, Any]) -> Verdict:
    kind, reason = verdict_of_version_1(data["kind"], data["reason"])
    return Verdict(kind=kind, reason=reason, ranks=tuple(data["ranks"]), also=tuple(data["also"]))
