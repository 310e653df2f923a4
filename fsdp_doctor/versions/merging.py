"""From several reports to the merged one, or from a merged one and more reports to the next."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from fsdp_doctor import __version__
from fsdp_doctor.errors import UsageError
from fsdp_doctor.report.document import Report
from fsdp_doctor.versions.columns import MergedColumn, columns_of, joined
from fsdp_doctor.versions.merged import NOWHERE, Environment, MergedCase, MergedReport, Outcome
from fsdp_doctor.versions.statements import VersionRow, machine, public, statement, version_order, version_rows


def merge(reports: Mapping[str, Report | MergedReport]) -> MergedReport:
    """``reports``: by the name that the merged one shall have of each.

    Reports of one environment that have different cases become one. Raises UsageError where two have the same case:
    nothing says which of them counts.
    """
    columns = joined(column for name, report in reports.items() for column in columns_of(name, report))
    columns.sort(key=_place_in_order)
    environments = _named([column.environment for column in columns])
    rows = version_rows(environments)
    outcomes: dict[Outcome, int] = {}
    cases = [_with_outcomes(case, columns, outcomes, rows) for case in _cases(columns)]
    return MergedReport(
        version=__version__, environments=tuple(environments), outcomes=tuple(outcomes), cases=tuple(cases)
    )


def names_beside(reports: Sequence[pathlib.Path], merged: pathlib.Path | None) -> list[str]:
    """What the merged report calls each: its path from there, if both lie below the working directory.

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
    """With names that tell them apart: torch and device, and as much more as it takes."""
    short = [
        f"torch {public(one.torch) or 'unknown'}, {one.device if one.world_size else NOWHERE}" for one in environments
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


def _cases(columns: Sequence[MergedColumn]) -> Iterable[MergedCase]:
    """Every case once, in the order of the environment that has most of them."""
    longest_first = sorted(columns, key=lambda column: len(column.rows), reverse=True)
    return {case_id: row for column in longest_first for case_id, row in column.rows.items()}.values()


def _with_outcomes(
    case: MergedCase, columns: Sequence[MergedColumn], numbers: dict[Outcome, int], rows: Sequence[VersionRow]
) -> MergedCase:
    """The case with what it showed. numbers: of the outcomes, to which new ones are added."""
    shown = [column.outcomes.get(case.id) for column in columns]
    indices = [None if outcome is None else numbers.setdefault(outcome, len(numbers)) for outcome in shown]
    return dataclasses.replace(case, outcomes=tuple(indices), statements=tuple(statement(row, shown) for row in rows))
