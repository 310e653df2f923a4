"""Merges the reports of several runs into one, or a merged report and further reports into a new merged report."""

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
from fsdp_doctor.matrix.axes import Offload, Staging
from fsdp_doctor.matrix.cases import AnyCase, read_leading_words
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.methods import find_direction, is_user_method, list_methods
from fsdp_doctor.report.document import CaseResult, Report, make_context, recognize_failure
from fsdp_doctor.report.versions.merged import (
    NOWHERE,
    SHORTENED,
    Environment,
    MergedCase,
    MergedReport,
    Outcome,
    Period,
    Statement,
)
from fsdp_doctor.text import format_count

# The version of this package is ignored, because it is not under test.
_DOCTOR = "fsdp-doctor"
_LONGEST_MESSAGE = 1000
# Options that name files are removed: they do not change the results, and would disclose paths of the machine.
_OUTPUT = re.compile(r" --(?:json|markdown|junit|svg|html)(?: |=)(?:'[^']*'|\S+)| --resume\b")


@dataclass(frozen=True)
class _Column:
    """An environment with its results.

    rows: maps ids to cases, without outcomes and statements.
    outcomes: maps the same ids to outcomes.
    """

    environment: Environment
    rows: Mapping[str, MergedCase]
    outcomes: Mapping[str, Outcome]


def merge(reports: Mapping[str, Report | MergedReport]) -> MergedReport:
    """Merges reports.

    Reports of the same environment with different cases become one column. Raises UsageError if two reports of the same
    environment have the same case, because it would be unclear which result counts.

    reports: maps names, which the merged report uses, to reports.
    """
    columns: dict[tuple[object, ...], _Column] = {}
    for column in itertools.chain.from_iterable(itertools.starmap(_make_columns, reports.items())):
        key = (
            column.environment.torch,
            _describe_machine(column.environment),
            *sorted(_list_facts(column.environment).items()),
        )
        columns[key] = _join(columns[key], column) if key in columns else column
    ordered = sorted(columns.values(), key=lambda column: _make_environment_key(column.environment))
    environments = _name_environments([column.environment for column in ordered])
    version_rows = _list_version_rows(environments)
    numbers: dict[Outcome, int] = {}
    cases = []
    # Cases are in the order of the environment that has the most cases.
    longest_first = sorted(ordered, key=lambda column: len(column.rows), reverse=True)
    for case_id, row in {name: row for column in longest_first for name, row in column.rows.items()}.items():
        outcomes = [column.outcomes.get(case_id) for column in ordered]
        indices = [None if outcome is None else numbers.setdefault(outcome, len(numbers)) for outcome in outcomes]
        statements = tuple(_make_statement(versions, outcomes) for versions in version_rows)
        cases.append(dataclasses.replace(row, outcomes=tuple(indices), statements=statements))
    return MergedReport(
        version=__version__, environments=tuple(environments), outcomes=tuple(numbers), cases=tuple(cases)
    )


def choose_names(reports: Sequence[pathlib.Path], merged: pathlib.Path | None) -> list[str]:
    """Chooses the name of each report: its path relative to the merged report, if both are below the working directory.

    Otherwise the name is the file's name, with its folder if two files have the same name, because a full path would
    disclose more about a machine than needed. Raises UsageError if a file is given twice, or if two files have the same
    name in folders of the same name.
    """
    resolved = [file.resolve() for file in reports]
    if twice := [file for file, place in zip(reports, resolved, strict=True) if resolved.count(place) > 1]:
        raise UsageError(f"{twice[0]} is given twice")
    names: list[str] = []
    for num_parts in (1, 2):
        names = [_choose_name(file, merged, num_parts) for file in resolved]
        if len(set(names)) == len(names):
            return names
    raise UsageError(f"two of the reports would have the name {max(names, key=names.count)}; rename one of them")


def _choose_name(file: pathlib.Path, merged: pathlib.Path | None, num_parts: int) -> str:
    here = pathlib.Path.cwd()
    if merged is not None and all(each.is_relative_to(here) for each in (file, merged.resolve())):
        return pathlib.Path(os.path.relpath(file, merged.resolve().parent)).as_posix()
    return "/".join(file.parts[-num_parts:])


# Columns


def _make_columns(name: str, report: Report | MergedReport) -> list[_Column]:
    """Makes the columns of a report with this name. The columns of a merged report keep their names."""
    if isinstance(report, MergedReport):
        return [_make_merged_column(report, number) for number in range(len(report.environments))]
    context = make_context(report)
    # The failures are recognized again, because the current catalogue may know more than the catalogue of the run. A
    # method that the current table lacks keeps its result.
    results = [recognize_failure(result, context) if _has_method(result.case) else result for result in report.results]
    return [
        _Column(
            _make_environment(name, report),
            {result.id: _make_row(result.case) for result in results},
            {result.id: _make_outcome(result, report.device) for result in results},
        )
    ]


def _make_merged_column(merged: MergedReport, number: int) -> _Column:
    rows, outcomes = {}, {}
    for case in merged.cases:
        if (outcome := merged.find_outcome(case, number)) is not None:
            rows[case.id] = dataclasses.replace(case, outcomes=(), statements=())
            outcomes[case.id] = _judge_measured(outcome, rows[case.id], merged.environments[number].device)
    return _Column(merged.environments[number], rows, outcomes)


def _make_environment(name: str, report: Report) -> Environment:
    facts = report.environment
    packages = dict(report.packages)
    torch = facts.get("torch", packages.get("torch", ""))
    if torch and "torch" not in packages and make_version_key(torch)[0]:
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


def _make_row(case: AnyCase) -> MergedCase:
    strategy, offload, staging = read_leading_words(case)
    return MergedCase(
        id=case.id,
        strategy=strategy,
        offload=offload,
        staging=staging,
        # A method that only another version of the doctor has is shown among the extractions.
        direction=find_direction(case) if _has_method(case) else "out",
        method=case.method,
        outcomes=(),
        statements=(),
    )


def _has_method(case: AnyCase) -> bool:
    """Returns whether this version of the doctor knows the method."""
    if isinstance(case, FrameworkCase):
        return any(method.name == case.plain_method for method in case.scenario.list_methods())
    return is_user_method(case.method) or any(method.name == case.method for method in list_methods(case.scenario))


def _judge_measured(outcome: Outcome, row: MergedCase, device: str) -> Outcome:
    """Returns the outcome, or "unmeasurable" instead of an ok on the CPU that proves nothing.

    An ok proves nothing on the CPU if the case has an offload or staging, which moves memory only on other devices.
    """
    moves = row.offload not in ("", str(Offload())) or row.staging == Staging.STAGED
    if device != "cpu" or outcome.kind != "ok" or not moves:
        return outcome
    return dataclasses.replace(outcome, kind="unmeasurable", reason="on the CPU an offload or staging moves nothing")


def _make_outcome(result: CaseResult, device: str) -> Outcome:
    verdict, failure = result.verdict, result.failure
    message = f"{failure.type}: {failure.message}" if failure is not None else ""
    if len(message) > _LONGEST_MESSAGE:
        message = message[: _LONGEST_MESSAGE - len(SHORTENED)] + SHORTENED
    outcome = Outcome(
        kind=verdict.kind,
        reason=verdict.reason,
        ranks=verdict.ranks,
        also=verdict.also,
        message=message,
        known=result.known,
    )
    return _judge_measured(outcome, _make_row(result.case), device)


def _join(first: _Column, other: _Column) -> _Column:
    """Joins two columns of one environment. Raises UsageError if both have the same case."""
    both = (first.environment, other.environment)
    names = [name for each in both for name in each.reports]
    if twice := first.outcomes.keys() & other.outcomes.keys():
        raise UsageError(
            f"{' and '.join(names)} are of one environment (torch {both[0].torch}, {_describe_machine(both[0])}) "
            f"and both have {min(twice)}; merge only one of them"
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
    return _Column(environment, {**first.rows, **other.rows}, {**first.outcomes, **other.outcomes})


def _make_environment_key(environment: Environment) -> tuple[object, ...]:
    """Returns a key that sorts by machine and version. An environment that could not be made comes last."""
    torch = make_version_key(strip_build(environment.torch))
    never_made = environment.world_size == 0
    return never_made, _describe_machine(environment), torch, environment.created, environment.reports


def _name_environments(environments: Sequence[Environment]) -> list[Environment]:
    """Names environments by torch and device, and by further facts if these names are not unique."""
    short = [
        f"torch {strip_build(each.torch) or 'unknown'}, {each.device if each.world_size else NOWHERE}"
        for each in environments
    ]
    names = []
    for name, each in zip(short, environments, strict=True):
        rivals = [
            _list_facts(other) for other in environments if (other.torch, other.device) == (each.torch, each.device)
        ]
        differing = [
            f"{key} {value}"
            for key, value in _list_facts(each).items()
            if key not in ("torch", "options") and any(facts.get(key) != value for facts in rivals)
        ]
        names.append(", ".join([name, _describe_machine(each), *differing]) if short.count(name) > 1 else name)
    unique = [f"{name} ({index + 1})" if names.count(name) > 1 else name for index, name in enumerate(names)]
    return [dataclasses.replace(each, name=name) for each, name in zip(environments, unique, strict=True)]


def _describe_machine(environment: Environment) -> str:
    """Returns the ranks and the device, for example ``2 ranks of emulated``."""
    kinds = " and ".join(dict.fromkeys(environment.accelerators)) if environment.device != "cpu" else ""
    return f"{format_count(environment.world_size, 'rank')} of {kinds or environment.device}"


def _list_facts(environment: Environment) -> dict[str, str]:
    """Returns, by name, the facts that can differ between environments of one machine."""
    packages = {name: version for name, version in environment.packages.items() if name != _DOCTOR}
    # Device and number of ranks are left out, because the description of the machine has them.
    options = " ".join(re.sub(r"--(?:device|nproc) \S+", "", environment.rerun_options).split())
    return {**packages, "python": environment.python, "options": options}


# Rows of versions, and statements on them


@dataclass(frozen=True, kw_only=True)
class _VersionRow:
    """Environments that differ only in the version of ``package``.

    where: the facts that the environments share.
    environments: the index of the environment by the version's short name, the oldest first.
    untried: versions of the package without an environment in this row, between its oldest and newest version.
    """

    package: str
    where: str
    environments: dict[str, int]
    untried: tuple[str, ...]


def _list_version_rows(environments: Sequence[Environment]) -> list[_VersionRow]:
    """Returns the rows of at least two environments for each package with several versions; torch's rows come first."""
    packages = ["torch", *sorted({name for each in environments for name in each.packages} - {"torch", _DOCTOR})]
    rows = []
    for package in packages:
        groups: dict[str, list[int]] = {}
        differing = _find_differing_facts(environments, package)
        for index, environment in enumerate(environments):
            if environment.packages.get(package):
                facts = _list_facts(environment)
                words = [
                    _describe_machine(environment),
                    *(f"{name} {facts[name]}" for name in differing if facts.get(name)),
                ]
                groups.setdefault(", ".join(words), []).append(index)
        rows += [
            _make_version_row(package, where, environments, group) for where, group in groups.items() if len(group) > 1
        ]
    return rows


def _find_differing_facts(environments: Sequence[Environment], package: str) -> list[str]:
    """Returns the facts that differ between environments with the same version of ``package`` on the same machine."""
    alike: dict[tuple[str, str], list[dict[str, str]]] = {}
    for each in environments:
        alike.setdefault((each.packages.get(package, ""), _describe_machine(each)), []).append(_list_facts(each))
    others = {name for group in alike.values() for facts in group for name in facts} - {package}
    return sorted(
        name for name in others if any(len({facts.get(name) for facts in group}) > 1 for group in alike.values())
    )


def _make_version_row(
    package: str, where: str, environments: Sequence[Environment], group: Sequence[int]
) -> _VersionRow:
    version_of = {index: strip_build(environments[index].packages[package]) for index in group}
    everywhere = sort_versions(
        strip_build(each.packages[package]) for each in environments if each.packages.get(package)
    )
    short = shorten_names(everywhere) if package == "torch" else {version: version for version in everywhere}
    ordered = sorted(group, key=lambda index: make_version_key(version_of[index]))
    ran = {short[version_of[index]]: index for index in ordered}
    first, last = version_of[ordered[0]], version_of[ordered[-1]]
    between = make_version_key(first), make_version_key(last)
    candidates = [short[version] for version in everywhere if between[0] < make_version_key(version) < between[1]]
    if package == "torch":
        candidates += _list_minors_between(first, last, everywhere)
    untried = tuple(version for version in sort_versions(candidates) if version not in ran)
    return _VersionRow(package=package, where=where, environments=ran, untried=untried)


def _list_minors_between(first: str, last: str, there: Sequence[str]) -> list[str]:
    """Returns the releases of torch between ``first`` and ``last`` that have no environment."""
    if not (make_version_key(first)[0] and make_version_key(last)[0]) or Version(first).major != Version(last).major:
        return []
    tried = {Version(version).minor for version in there if make_version_key(version)[0]}
    major = Version(first).major
    return [f"{major}.{minor}" for minor in range(Version(first).minor + 1, Version(last).minor) if minor not in tried]


def _make_statement(row: _VersionRow, outcomes: Sequence[Outcome | None]) -> Statement:
    """Makes the statement on one case.

    outcomes: the outcome in each environment.
    """
    periods: list[Period] = []
    missing = list(row.untried)
    for version, index in row.environments.items():
        outcome = outcomes[index]
        if outcome is None:
            missing.append(version)
        elif periods and (periods[-1].kind, periods[-1].known) == (outcome.kind, outcome.known):
            periods[-1] = dataclasses.replace(periods[-1], until=version)
        else:
            periods.append(Period(kind=outcome.kind, known=outcome.known, since=version, until=version))
    not_run = tuple(sort_versions(missing))
    text = _write_statement(row.package, periods, not_run)
    return Statement(package=row.package, where=row.where, periods=tuple(periods), not_run=not_run, text=text)


def _write_statement(package: str, periods: Sequence[Period], not_run: Sequence[str]) -> str:
    """Writes a statement as text, for example ``crash since torch 2.6, ok from 2.14; 2.12, 2.13 not run``."""
    missing = f"{', '.join(not_run)} not run"
    if not periods:
        return f"{package} {missing}"
    parts = [f"{periods[0].kind} since {package} {periods[0].since}"]
    for before, period in itertools.pairwise(periods):
        entry = f" ({period.known or 'not in the catalogue'})" if before.kind == period.kind else ""
        parts.append(f"{period.kind}{entry} from {period.since}")
    return "; ".join([", ".join(parts), *([missing] if not_run else [])])


def sort_versions(versions: Iterable[str]) -> list[str]:
    """Sorts distinct versions, the oldest first."""
    return sorted(set(versions), key=make_version_key)


def make_version_key(text: str) -> tuple[bool, Version]:
    """Returns a key to sort versions by. Texts that are not versions come first."""
    try:
        return True, Version(text)
    except InvalidVersion:
        return False, Version("0")


def strip_build(version: str) -> str:
    """Removes the build from a version: ``2.13.0+cpu`` becomes ``2.13.0``."""
    return version.partition("+")[0]


def shorten_names(versions: Sequence[str]) -> dict[str, str]:
    """Maps each version of torch to a short name: the first two numbers, or the whole version if these are shared."""
    minors = {version: ".".join(version.split(".")[:2]) for version in versions}
    every_minor = list(minors.values())
    return {
        version: minor if every_minor.count(minor) == 1 and make_version_key(version)[0] else version
        for version, minor in minors.items()
    }
