"""What changed from version to version: environments that differ in one package's version, and a case along them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from fsdp_doctor.versions.merged import Environment, Outcome, Period, Statement

# The doctor's own version is no part of what is under test.
_OWN = "fsdp-doctor"


@dataclass(frozen=True, kw_only=True)
class VersionRow:
    """Environments that are alike but for the version of ``package``.

    where: what they share. environments: indices by version as it is told, oldest first.
    untried: versions of the package that lie between two of them and have no environment.
    """

    package: str
    where: str
    environments: dict[str, int]
    untried: tuple[str, ...]


def version_rows(environments: Sequence[Environment]) -> list[VersionRow]:
    """For each package that has several versions, the rows of two environments and more; torch's first."""
    packages = ["torch", *sorted({name for one in environments for name in one.packages} - {"torch", _OWN})]
    rows = []
    for package in packages:
        groups: dict[str, list[int]] = {}
        beside = _apart(environments, package)
        for index, environment in enumerate(environments):
            if environment.packages.get(package):
                groups.setdefault(_where(environment, beside), []).append(index)
        rows += [_row(package, where, environments, group) for where, group in groups.items() if len(group) > 1]
    return rows


def statement(row: VersionRow, outcomes: Sequence[Outcome | None]) -> Statement:
    """``outcomes``: of one case, by environment."""
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
        package=row.package, where=row.where, periods=tuple(periods), not_run=not_run, text=_text(row, periods, not_run)
    )


def in_order(versions: Iterable[str]) -> list[str]:
    return sorted(set(versions), key=version_order)


def version_order(text: str) -> tuple[bool, Version]:
    """What is no version comes first."""
    try:
        return True, Version(text)
    except InvalidVersion:
        return False, Version("0")


def _text(row: VersionRow, periods: Sequence[Period], not_run: Sequence[str]) -> str:
    """``crash since torch 2.6, ok from 2.14; 2.12, 2.13 not run``."""
    missing = f"{', '.join(not_run)} not run"
    if not periods:
        return f"{row.package} {missing}"
    said = [f"{periods[0].kind} since {row.package} {periods[0].since}"]
    for before, period in itertools.pairwise(periods):
        entry = f" ({period.known or 'not in the catalogue'})" if before.kind == period.kind else ""
        said.append(f"{period.kind}{entry} from {period.since}")
    return "; ".join([", ".join(said), *([missing] if not_run else [])])


def _apart(environments: Sequence[Environment], package: str) -> tuple[str, ...]:
    """The other facts in which environments differ that have the same version of ``package`` on the same machine."""
    same: dict[tuple[str, str], list[dict[str, str]]] = {}
    for one in environments:
        same.setdefault((one.packages.get(package, ""), machine(one)), []).append(_facts(one))
    others = {name for one in environments for name in _facts(one)} - {package}
    return tuple(
        sorted(name for name in others if any(len({facts.get(name) for facts in group}) > 1 for group in same.values()))
    )


def _facts(environment: Environment) -> dict[str, str]:
    """What can differ between environments beside the machine."""
    packages = {name: version for name, version in environment.packages.items() if name != _OWN}
    return {**packages, "python": environment.python, "options": own_options(environment.rerun_options)}


def own_options(rerun_options: str) -> str:
    """The options that change what runs, without those that the device and the number of ranks say already."""
    return " ".join(re.sub(r"--(?:device|nproc) \S+", "", rerun_options).split())


def _where(environment: Environment, beside: Iterable[str]) -> str:
    facts = _facts(environment)
    return ", ".join([machine(environment), *(f"{name} {facts.get(name) or 'none'}" for name in beside)])


def machine(environment: Environment) -> str:
    """``2 ranks of emulated``."""
    kinds = " and ".join(dict.fromkeys(environment.accelerators)) if environment.device != "cpu" else ""
    ranks = "1 rank" if environment.world_size == 1 else f"{environment.world_size} ranks"
    return f"{ranks} of {kinds or environment.device}"


def _row(package: str, where: str, environments: Sequence[Environment], group: Sequence[int]) -> VersionRow:
    full = {index: public(environments[index].packages[package]) for index in group}
    everywhere = in_order(public(one.packages[package]) for one in environments if one.packages.get(package))
    told = short_names(everywhere) if package == "torch" else {version: version for version in everywhere}
    ordered = sorted(group, key=lambda index: version_order(full[index]))
    ran = {told[full[index]]: index for index in ordered}
    first, last = version_order(full[ordered[0]]), version_order(full[ordered[-1]])
    candidates = [told[version] for version in everywhere if first < version_order(version) < last]
    if package == "torch":
        candidates += _minors_between(full[ordered[0]], full[ordered[-1]], everywhere)
    untried = tuple(version for version in in_order(candidates) if version not in ran)
    return VersionRow(package=package, where=where, environments=ran, untried=untried)


def public(version: str) -> str:
    """Without what a build adds to it: ``2.13.0+cpu`` is ``2.13.0``."""
    return version.partition("+")[0]


def short_names(versions: Sequence[str]) -> dict[str, str]:
    """Of torch the first two numbers say enough where no other version has them."""
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
