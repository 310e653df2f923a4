"""From several reports to the merged one."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from fsdp_doctor import __version__
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.paths import find_path, is_user_path, paths_for
from fsdp_doctor.report.document import CaseResult, Report, context_of, recognized
from fsdp_doctor.versions.merged import Environment, MergedCase, MergedReport, Outcome
from fsdp_doctor.versions.statements import (
    VersionRow,
    machine,
    own_options,
    public,
    statement,
    version_order,
    version_rows,
)

_LONGEST_MESSAGE = 1000
_SHORTENED = " ..."


def merge(reports: Mapping[str, Report]) -> MergedReport:
    """``reports``: by the name that the merged one shall have of each.

    Reports of one environment that have different cases become one. Raises UsageError where two have the same case:
    nothing says which of them counts.
    """
    columns: list[_Column] = []
    for name, report in reports.items():
        column = _Column(_environment(name, report), {result.id: result for result in _recognized(report)})
        alike = next((one for one in columns if _same_place(one.environment, column.environment)), None)
        if alike is None:
            columns.append(column)
        else:
            columns[columns.index(alike)] = _joined(alike, column)
    columns.sort(key=_place_in_order)
    environments = _named([column.environment for column in columns])
    return _merged(environments, [column.results for column in columns])


def name_beside(report: pathlib.Path, merged: pathlib.Path | None) -> str:
    """The report's path from where the merged one is written, if both lie below the working directory.

    Else its name alone: a path says more of a machine than others need to know.
    """
    here = pathlib.Path.cwd()
    if merged is not None and all(file.resolve().is_relative_to(here) for file in (report, merged)):
        return pathlib.Path(os.path.relpath(report.resolve(), merged.resolve().parent)).as_posix()
    return report.name


def direction_of(case: Case) -> Direction:
    """``out`` for a path that only another version of the doctor has."""
    return find_path(case.path, case.scenario.version).direction if _has_path(case) else "out"


@dataclasses.dataclass(frozen=True)
class _Column:
    environment: Environment
    results: Mapping[str, CaseResult]


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
        command=report.command,
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


def _has_path(case: Case) -> bool:
    return is_user_path(case.path) or any(path.name == case.path for path in paths_for(case.scenario))


def _same_place(one: Environment, other: Environment) -> bool:
    return _place(one) == _place(other)


def _place(environment: Environment) -> tuple[object, ...]:
    packages = {name: version for name, version in environment.packages.items() if name != "fsdp-doctor"}
    options = own_options(environment.rerun_options)
    return (environment.torch, machine(environment), environment.python, sorted(packages.items()), options)


def _joined(one: _Column, other: _Column) -> _Column:
    """Two reports of one environment that have no case in common."""
    names = [*one.environment.reports, *other.environment.reports]
    if both := one.results.keys() & other.results.keys():
        raise UsageError(
            f"{' and '.join(names)} are of one environment (torch {one.environment.torch}, {machine(one.environment)}) "
            f"and both have {min(both)}; merge one of them"
        )
    environment = dataclasses.replace(
        one.environment,
        reports=tuple(names),
        created=max(one.environment.created, other.environment.created),
        notes=tuple(dict.fromkeys([*one.environment.notes, *other.environment.notes])),
        complete=one.environment.complete and other.environment.complete,
        ended="; ".join(filter(None, [one.environment.ended, other.environment.ended])),
    )
    return _Column(environment, {**one.results, **other.results})


def _place_in_order(column: _Column) -> tuple[object, ...]:
    environment = column.environment
    return (machine(environment), version_order(public(environment.torch)), environment.created, environment.reports)


def _named(environments: Sequence[Environment]) -> list[Environment]:
    """With names that tell them apart: torch and device, and as much more as it takes."""
    short = [
        f"torch {public(one.torch) or 'unknown'}, {one.device if one.world_size else 'not run'}" for one in environments
    ]
    longer = [
        ", ".join([name, machine(one), *(f"{key} {value}" for key, value in _others(one, environments))])
        for name, one in zip(short, environments, strict=True)
    ]
    names = [long if short.count(name) > 1 else name for name, long in zip(short, longer, strict=True)]
    unique = [f"{name} ({index + 1})" if names.count(name) > 1 else name for index, name in enumerate(names)]
    return [dataclasses.replace(one, name=name) for one, name in zip(environments, unique, strict=True)]


def _others(one: Environment, environments: Sequence[Environment]) -> list[tuple[str, str]]:
    """The packages in which it differs from an environment of the same torch and device."""
    rivals = [other for other in environments if (other.torch, other.device) == (one.torch, one.device)]
    packages = {name: version for name, version in one.packages.items() if name not in ("torch", "fsdp-doctor")}
    return [
        (name, version)
        for name, version in {**packages, "python": one.python}.items()
        if any({**other.packages, "python": other.python}.get(name) != version for other in rivals)
    ]


def _merged(environments: Sequence[Environment], results: Sequence[Mapping[str, CaseResult]]) -> MergedReport:
    outcomes: dict[Outcome, int] = {}
    cases = []
    rows = version_rows(environments)
    for case_id, case in _cases(results):
        shown = [_outcome(of_one[case_id]) if case_id in of_one else None for of_one in results]
        indices = [None if outcome is None else outcomes.setdefault(outcome, len(outcomes)) for outcome in shown]
        cases.append(_merged_case(case, indices, shown, rows))
    return MergedReport(
        version=__version__, environments=tuple(environments), outcomes=tuple(outcomes), cases=tuple(cases)
    )


def _cases(results: Sequence[Mapping[str, CaseResult]]) -> Iterable[tuple[str, Case]]:
    """Every case once, in the order of the report that has most of them."""
    longest_first = sorted(results, key=len, reverse=True)
    return {case_id: result.case for of_one in longest_first for case_id, result in of_one.items()}.items()


def _merged_case(
    case: Case, indices: Sequence[int | None], outcomes: Sequence[Outcome | None], rows: Sequence[VersionRow]
) -> MergedCase:
    scenario = case.scenario
    return MergedCase(
        id=case.id,
        strategy=scenario.strategy,
        offload=scenario.offload,
        staging=scenario.staging,
        direction=direction_of(case),
        path=case.path,
        outcomes=tuple(indices),
        statements=tuple(statement(row, outcomes) for row in rows),
    )


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
            return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - len(_SHORTENED)] + _SHORTENED
    return ""
