"""What one environment showed of each case: of a report, or of a merged one that has several environments."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.cases import AnyCase, leading_words
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.paths import direction_of, is_user_path, paths_for
from fsdp_doctor.report.document import CaseResult, Report, context_of, recognized
from fsdp_doctor.versions.merged import SHORTENED, Environment, MergedCase, MergedReport, Outcome
from fsdp_doctor.versions.statements import machine, own_options, version_order

_LONGEST_MESSAGE = 1000
# Where a run wrote its files makes no difference, and says more of a machine than others need to know.
_OUTPUT = re.compile(r" --(?:json|markdown|junit|svg|html)(?: |=)(?:'[^']*'|\S+)| --resume\b")


@dataclass(frozen=True)
class MergedColumn:
    """An environment. rows: by id of the case, without outcomes and statements. outcomes: by the same id."""

    environment: Environment
    rows: Mapping[str, MergedCase]
    outcomes: Mapping[str, Outcome]


def columns_of(name: str, report: Report | MergedReport) -> list[MergedColumn]:
    """The environments of a report. name: what the merged one calls it; those in it keep the names that they have."""
    if isinstance(report, MergedReport):
        return [_column_within(report, number) for number in range(len(report.environments))]
    results = list(_recognized(report))
    return [
        MergedColumn(
            _environment(name, report),
            {result.id: _row(result.case) for result in results},
            {result.id: _outcome(result) for result in results},
        )
    ]


def joined(columns: Iterable[MergedColumn]) -> list[MergedColumn]:
    """With those of one environment as one. Raises UsageError where both have the same case.

    Nothing says which of them counts.
    """
    found: list[MergedColumn] = []
    for column in columns:
        alike = next((one for one in found if _place(one.environment) == _place(column.environment)), None)
        if alike is None:
            found.append(column)
        else:
            found[found.index(alike)] = _joined(alike, column)
    return found


def _column_within(merged: MergedReport, number: int) -> MergedColumn:
    shown = {case.id: merged.outcome(case, number) for case in merged.cases}
    return MergedColumn(
        merged.environments[number],
        {case.id: dataclasses.replace(case, outcomes=(), statements=()) for case in merged.cases if shown[case.id]},
        {case_id: outcome for case_id, outcome in shown.items() if outcome is not None},
    )


def _place(environment: Environment) -> tuple[object, ...]:
    packages = {name: version for name, version in environment.packages.items() if name != "fsdp-doctor"}
    options = own_options(environment.rerun_options)
    return (environment.torch, machine(environment), environment.python, sorted(packages.items()), options)


def _joined(one: MergedColumn, other: MergedColumn) -> MergedColumn:
    both = (one.environment, other.environment)
    names = [name for each in both for name in each.reports]
    if twice := one.outcomes.keys() & other.outcomes.keys():
        raise UsageError(
            f"{' and '.join(names)} are of one environment (torch {both[0].torch}, {machine(both[0])}) "
            f"and both have {min(twice)}; merge one of them"
        )
    environment = dataclasses.replace(
        both[0],
        command="; ".join(dict.fromkeys(each.command for each in both)),
        reports=tuple(names),
        created=max(each.created for each in both),
        notes=tuple(dict.fromkeys(note for each in both for note in each.notes)),
        complete=all(each.complete for each in both),
        ended="; ".join(filter(None, (each.ended for each in both))),
    )
    return MergedColumn(environment, {**one.rows, **other.rows}, {**one.outcomes, **other.outcomes})


def _environment(name: str, report: Report) -> Environment:
    facts = report.environment
    packages = dict(facts.get("packages", {}))
    torch = facts.get("torch", packages.get("torch", ""))
    if torch and "torch" not in packages and version_order(torch)[0]:
        packages["torch"] = torch
    missing = report.num_selected - len(report.results)
    return Environment(
        name="",
        torch=torch,
        device=report.device,
        accelerators=tuple(facts.get("accelerators", ())),
        world_size=report.world_size,
        python=facts.get("python", ""),
        packages=packages,
        version=report.version,
        command=_OUTPUT.sub("", report.command),
        rerun_options=report.rerun_options,
        created=report.created,
        reports=(name,),
        notes=report.notes,
        complete=report.complete,
        ended="" if report.complete else report.ended or f"{missing} cases have no result yet",
    )


def _recognized(report: Report) -> Iterable[CaseResult]:
    """The results with the entries that today's catalogue knows them by; what it has no path of stays as it was."""
    context = context_of(report)
    return (recognized(result, context) if _has_path(result.case) else result for result in report.results)


def _has_path(case: AnyCase) -> bool:
    if isinstance(case, FrameworkCase):
        return any(path.name == case.path for path in case.scenario.paths())
    return is_user_path(case.path) or any(path.name == case.path for path in paths_for(case.scenario))


def _row(case: AnyCase) -> MergedCase:
    strategy, offload, staging = leading_words(case)
    return MergedCase(
        id=case.id,
        strategy=strategy,
        offload=offload,
        staging=staging,
        direction=_direction(case),
        path=case.path,
        outcomes=(),
        statements=(),
    )


def _direction(case: AnyCase) -> Direction:
    """``out`` for a path that only another version of the doctor has."""
    return direction_of(case) if _has_path(case) else "out"


def _outcome(result: CaseResult) -> Outcome:
    verdict = result.verdict
    return Outcome(
        kind=verdict.kind,
        reason=verdict.reason,
        ranks=verdict.ranks,
        also=verdict.also,
        message=_message(result),
        known=result.known,
    )


def _message(result: CaseResult) -> str:
    """Of the first rank that the verdict names, or of any that raised."""
    named = sorted(result.ranks, key=lambda report: report.rank not in result.verdict.ranks)
    for report in named:
        if report.record is not None and report.record.failure is not None:
            failure = report.record.failure
            text = f"{failure.type}: {failure.message}"
            return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - len(SHORTENED)] + SHORTENED
    return ""
