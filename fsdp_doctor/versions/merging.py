"""Merges reports of several runs into one, or a merged one and more reports into the next."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from fsdp_doctor import __version__
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.cases import AnyCase, leading_words
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.paths import direction_of, is_user_path, paths_for
from fsdp_doctor.report.document import CaseResult, Report, context_of, recognized
from fsdp_doctor.versions.merged import (
    NOWHERE,
    SHORTENED,
    Environment,
    MergedCase,
    MergedReport,
    Outcome,
    Period,
    Statement,
)

# The doctor's version is not under test.
_OWN = "fsdp-doctor"


@dataclass(frozen=True, kw_only=True)
class VersionRow:
    """Environments that are alike but for the version of ``package``.

    where: the facts that they share. environments: indices by the version's short name, oldest first.
    untried: versions of the package that lie between two of them and have no environment.
    """

    package: str
    where: str
    environments: dict[str, int]
    untried: tuple[str, ...]


def version_rows(environments: Sequence[Environment]) -> list[VersionRow]:
    """The rows of two and more environments for each package with several versions; torch's first."""
    packages = ["torch", *sorted({name for each in environments for name in each.packages} - {"torch", _OWN})]
    rows = []
    for package in packages:
        groups: dict[str, list[int]] = {}
        differing = _differing_facts(environments, package)
        for index, environment in enumerate(environments):
            if environment.packages.get(package):
                groups.setdefault(_row_label(environment, differing), []).append(index)
        rows += [_version_row(package, where, environments, group) for where, group in groups.items() if len(group) > 1]
    return rows


def make_statement(row: VersionRow, outcomes: Sequence[Outcome | None]) -> Statement:
    """The statement on one case. outcomes: of the case, by environment."""
    periods: list[Period] = []
    for version, index in row.environments.items():
        outcome = outcomes[index]
        if outcome is None:
            continue
        last = periods[-1] if periods else None
        if last is not None and (last.kind, last.known) == (outcome.kind, outcome.known):
            periods[-1] = Period(kind=last.kind, known=last.known, since=last.since, until=version)
        else:
            periods.append(Period(kind=outcome.kind, known=outcome.known, since=version, until=version))
    missing = [version for version, index in row.environments.items() if outcomes[index] is None]
    not_run = tuple(in_order([*missing, *row.untried]))
    return Statement(
        package=row.package,
        where=row.where,
        periods=tuple(periods),
        not_run=not_run,
        text=_statement_text(row, periods, not_run),
    )


def in_order(versions: Iterable[str]) -> list[str]:
    return sorted(set(versions), key=version_order)


def version_order(text: str) -> tuple[bool, Version]:
    """A key to sort by; texts that are no versions come first."""
    try:
        return True, Version(text)
    except InvalidVersion:
        return False, Version("0")


def _statement_text(row: VersionRow, periods: Sequence[Period], not_run: Sequence[str]) -> str:
    """``crash since torch 2.6, ok from 2.14; 2.12, 2.13 not run``."""
    missing = f"{', '.join(not_run)} not run"
    if not periods:
        return f"{row.package} {missing}"
    parts = [f"{periods[0].kind} since {row.package} {periods[0].since}"]
    for before, period in itertools.pairwise(periods):
        entry = f" ({period.known or 'not in the catalogue'})" if before.kind == period.kind else ""
        parts.append(f"{period.kind}{entry} from {period.since}")
    return "; ".join([", ".join(parts), *([missing] if not_run else [])])


def _differing_facts(environments: Sequence[Environment], package: str) -> tuple[str, ...]:
    """The other facts in which environments differ that have the same version of ``package`` on the same machine."""
    same: dict[tuple[str, str], list[dict[str, str]]] = {}
    for each in environments:
        same.setdefault((each.packages.get(package, ""), machine(each)), []).append(_facts(each))
    others = {name for each in environments for name in _facts(each)} - {package}
    return tuple(
        sorted(name for name in others if any(len({facts.get(name) for facts in group}) > 1 for group in same.values()))
    )


def _facts(environment: Environment) -> dict[str, str]:
    """The facts in which environments of one machine can differ."""
    packages = {name: version for name, version in environment.packages.items() if name != _OWN}
    return {**packages, "python": environment.python, "options": own_options(environment.rerun_options)}


def own_options(rerun_options: str) -> str:
    """The options that change what runs, without those that the device and the number of ranks say already."""
    return " ".join(re.sub(r"--(?:device|nproc) \S+", "", rerun_options).split())


def _row_label(environment: Environment, differing: Iterable[str]) -> str:
    facts = _facts(environment)
    return ", ".join([machine(environment), *(f"{name} {facts.get(name) or 'none'}" for name in differing)])


def machine(environment: Environment) -> str:
    """``2 ranks of emulated``."""
    kinds = " and ".join(dict.fromkeys(environment.accelerators)) if environment.device != "cpu" else ""
    ranks = "1 rank" if environment.world_size == 1 else f"{environment.world_size} ranks"
    return f"{ranks} of {kinds or environment.device}"


def _version_row(package: str, where: str, environments: Sequence[Environment], group: Sequence[int]) -> VersionRow:
    full = {index: public(environments[index].packages[package]) for index in group}
    everywhere = in_order(public(each.packages[package]) for each in environments if each.packages.get(package))
    short = short_names(everywhere) if package == "torch" else {version: version for version in everywhere}
    ordered = sorted(group, key=lambda index: version_order(full[index]))
    ran = {short[full[index]]: index for index in ordered}
    first, last = version_order(full[ordered[0]]), version_order(full[ordered[-1]])
    candidates = [short[version] for version in everywhere if first < version_order(version) < last]
    if package == "torch":
        candidates += _minors_between(full[ordered[0]], full[ordered[-1]], everywhere)
    untried = tuple(version for version in in_order(candidates) if version not in ran)
    return VersionRow(package=package, where=where, environments=ran, untried=untried)


def public(version: str) -> str:
    """The version without its build: ``2.13.0+cpu`` is ``2.13.0``."""
    return version.partition("+")[0]


def short_names(versions: Sequence[str]) -> dict[str, str]:
    """Short names of torch's versions: the first two numbers where no other version has them."""
    minors = {version: ".".join(version.split(".")[:2]) for version in versions}
    alone = {minor for minor in minors.values() if list(minors.values()).count(minor) == 1}
    return {
        version: minor if minor in alone and version_order(version)[0] else version for version, minor in minors.items()
    }


def _minors_between(first: str, last: str, there: Sequence[str]) -> list[str]:
    """torch counts its releases by the second number: those of which no environment has any."""
    if not (version_order(first)[0] and version_order(last)[0]) or Version(first).major != Version(last).major:
        return []
    had = {Version(version).minor for version in there if version_order(version)[0]}
    major = Version(first).major
    return [f"{major}.{minor}" for minor in range(Version(first).minor + 1, Version(last).minor) if minor not in had]


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
    """The columns of a report. name: of the report in the merged one; columns of a merged report keep their names."""
    if isinstance(report, MergedReport):
        return [_column_within(report, number) for number in range(len(report.environments))]
    results = list(_recognized(report))
    return [
        MergedColumn(
            _environment(name, report),
            {result.id: _case_row(result.case) for result in results},
            {result.id: _result_outcome(result) for result in results},
        )
    ]


def join_columns(columns: Iterable[MergedColumn]) -> list[MergedColumn]:
    """Joins columns of the same environment. Raises UsageError where both have the same case.

    Nothing says which of the two counts.
    """
    distinct: list[MergedColumn] = []
    for column in columns:
        alike = next((each for each in distinct if _identity(each.environment) == _identity(column.environment)), None)
        if alike is None:
            distinct.append(column)
        else:
            distinct[distinct.index(alike)] = _join_two(alike, column)
    return distinct


def _column_within(merged: MergedReport, number: int) -> MergedColumn:
    shown = {case.id: merged.outcome(case, number) for case in merged.cases}
    return MergedColumn(
        merged.environments[number],
        {case.id: dataclasses.replace(case, outcomes=(), statements=()) for case in merged.cases if shown[case.id]},
        {case_id: outcome for case_id, outcome in shown.items() if outcome is not None},
    )


def _identity(environment: Environment) -> tuple[object, ...]:
    packages = {name: version for name, version in environment.packages.items() if name != "fsdp-doctor"}
    options = own_options(environment.rerun_options)
    return (environment.torch, machine(environment), environment.python, sorted(packages.items()), options)


def _join_two(first: MergedColumn, other: MergedColumn) -> MergedColumn:
    both = (first.environment, other.environment)
    names = [name for each in both for name in each.reports]
    if twice := first.outcomes.keys() & other.outcomes.keys():
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
    return MergedColumn(environment, {**first.rows, **other.rows}, {**first.outcomes, **other.outcomes})


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


def _case_row(case: AnyCase) -> MergedCase:
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


def _result_outcome(result: CaseResult) -> Outcome:
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
    """The exception of the first rank that the verdict names, or of any rank that raised."""
    named = sorted(result.ranks, key=lambda report: report.rank not in result.verdict.ranks)
    for report in named:
        if report.record is not None and report.record.failure is not None:
            failure = report.record.failure
            text = f"{failure.type}: {failure.message}"
            return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - len(SHORTENED)] + SHORTENED
    return ""


def merge(reports: Mapping[str, Report | MergedReport]) -> MergedReport:
    """Merges reports. reports: by the name that each has in the merged one.

    Reports of one environment that have different cases become one. Raises UsageError where two have the same case:
    nothing says which of them counts.
    """
    columns = join_columns(column for name, report in reports.items() for column in columns_of(name, report))
    columns.sort(key=_place_in_order)
    environments = _named([column.environment for column in columns])
    rows = version_rows(environments)
    outcomes: dict[Outcome, int] = {}
    cases = [_with_outcomes(case, columns, outcomes, rows) for case in _all_cases(columns)]
    return MergedReport(
        version=__version__, environments=tuple(environments), outcomes=tuple(outcomes), cases=tuple(cases)
    )


def names_beside(reports: Sequence[pathlib.Path], merged: pathlib.Path | None) -> list[str]:
    """The name of each report in the merged one: its path from there, if both are below the working directory.

    Else its name, with the folder's where two have the same: a path says more of a machine than others need to know.
    Raises UsageError for a file that is given twice, and where the folders' names do not tell the files apart.
    """
    resolved = [file.resolve() for file in reports]
    if twice := [file for file, place in zip(reports, resolved, strict=True) if resolved.count(place) > 1]:
        raise UsageError(f"{twice[0]} is given twice")
    names: list[str] = []
    for parts in (1, 2):
        names = [_name_beside(file, merged, parts) for file in resolved]
        if len(set(names)) == len(names):
            return names
    raise UsageError(f"two of the reports would be known as {max(names, key=names.count)}; rename one of them")


def _name_beside(file: pathlib.Path, merged: pathlib.Path | None, parts: int) -> str:
    here = pathlib.Path.cwd()
    if merged is not None and all(each.is_relative_to(here) for each in (file, merged.resolve())):
        return pathlib.Path(os.path.relpath(file, merged.resolve().parent)).as_posix()
    return "/".join(file.parts[-parts:])


def _place_in_order(column: MergedColumn) -> tuple[object, ...]:
    environment = column.environment
    never_made = environment.world_size == 0
    return (
        never_made,
        machine(environment),
        version_order(public(environment.torch)),
        environment.created,
        environment.reports,
    )


def _named(environments: Sequence[Environment]) -> list[Environment]:
    """Names environments: by torch and device, and by as much more as it takes to tell them apart."""
    short = [
        f"torch {public(each.torch) or 'unknown'}, {each.device if each.world_size else NOWHERE}"
        for each in environments
    ]
    longer = [
        ", ".join([name, machine(each), *(f"{key} {value}" for key, value in _differing_packages(each, environments))])
        for name, each in zip(short, environments, strict=True)
    ]
    names = [long if short.count(name) > 1 else name for name, long in zip(short, longer, strict=True)]
    unique = [f"{name} ({index + 1})" if names.count(name) > 1 else name for index, name in enumerate(names)]
    return [dataclasses.replace(each, name=name) for each, name in zip(environments, unique, strict=True)]


def _differing_packages(environment: Environment, environments: Sequence[Environment]) -> list[tuple[str, str]]:
    """The packages in which it differs from an environment of the same torch and device."""
    rivals = [other for other in environments if (other.torch, other.device) == (environment.torch, environment.device)]
    packages = {name: version for name, version in environment.packages.items() if name not in ("torch", "fsdp-doctor")}
    return [
        (name, version)
        for name, version in {**packages, "python": environment.python}.items()
        if any({**other.packages, "python": other.python}.get(name) != version for other in rivals)
    ]


def _all_cases(columns: Sequence[MergedColumn]) -> Iterable[MergedCase]:
    """All cases, in the order of the environment that has most of them."""
    longest_first = sorted(columns, key=lambda column: len(column.rows), reverse=True)
    return {case_id: row for column in longest_first for case_id, row in column.rows.items()}.values()


def _with_outcomes(
    case: MergedCase, columns: Sequence[MergedColumn], numbers: dict[Outcome, int], rows: Sequence[VersionRow]
) -> MergedCase:
    """The case with its outcomes. numbers: of all outcomes so far, to which new ones are added."""
    shown = [column.outcomes.get(case.id) for column in columns]
    indices = [None if outcome is None else numbers.setdefault(outcome, len(numbers)) for outcome in shown]
    return dataclasses.replace(
        case, outcomes=tuple(indices), statements=tuple(make_statement(row, shown) for row in rows)
    )
