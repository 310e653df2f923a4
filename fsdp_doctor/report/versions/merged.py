"""The merged report of several runs: its records, its JSON file and its text.

Only the parts of a result on which a user acts are kept. ``python -m fsdp_doctor.report.versions.merged`` prints the
JSON schema.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import pathlib
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.report.document import Report
from fsdp_doctor.report.journal import read_document, read_json, read_report, replace_file, turn_write_errors
from fsdp_doctor.report.schema import make_document_schema
from fsdp_doctor.text import format_count
from fsdp_doctor.verdict.classification import GOOD, NOT_RUN, VerdictKind

MERGED_SCHEMA = "fsdp-doctor/merged"
MERGED_SCHEMA_VERSION = 1

# Marks the end of a message that was cut.
SHORTENED = " ..."

# Shown instead of the device if an environment could not be made.
NOWHERE = "not run"
# "unmeasurable": the case is ok on the CPU, where its offload or staging moves no memory, unlike on other devices.
MergedVerdict: TypeAlias = VerdictKind | Literal["unmeasurable"]
# "not run": the environment has no result of the case, or could not be made.
Shown: TypeAlias = MergedVerdict | Literal["not run"]
# The verdicts that say nothing about the case.
NO_ANSWER: frozenset[Shown] = frozenset({*NOT_RUN, "unmeasurable", "not run"})


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An environment in which cases ran, which is a column of the merged report.

    name: unique in the merged report.
    torch: the full version string of torch.
    device: the device type.
    accelerators: the names of the accelerators.
    packages: maps packages to versions, torch included.
    version: the version of fsdp-doctor.
    command: the command of the run.
    rerun_options: the options that a command needs besides ``--case`` to run one case alone.
    created: the time of the last report in ISO 8601.
    reports: the reports' paths relative to the merged report if they are known, else their file names.
    notes: sentences that a reader needs in order not to misread the verdicts.
    complete: whether every selected case has a result.
    ended: the reason why an incomplete run ended, or why there was no run.
    """

    name: str
    torch: str
    device: str
    accelerators: tuple[str, ...]
    world_size: int
    python: str
    packages: dict[str, str]
    version: str
    command: str
    rerun_options: str
    created: str
    reports: tuple[str, ...]
    notes: tuple[str, ...]
    complete: bool
    ended: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A result that one or more cases had.

    ranks: the ranks that the reason names.
    also: further problems, and consequences.
    message: ``Type: message`` of the exception, cut to 1,000 characters; empty if there was none.
    known: the id of the catalogue's entry for a bad verdict; empty if no entry matches.
    """

    kind: MergedVerdict
    reason: str
    ranks: tuple[int, ...]
    also: tuple[str, ...]
    message: str
    known: str


@dataclass(frozen=True, kw_only=True)
class Period:
    """Successive versions with the same verdict and entry, from the oldest (``since``) to the newest (``until``)."""

    kind: MergedVerdict
    known: str
    since: str
    until: str


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The verdicts of a case with each version of one package, if all other facts are equal.

    package: ``torch`` or another package.
    where: the device, the ranks, and the other facts that all these environments share.
    periods: the periods of equal verdicts, sorted by version; empty if nothing ran.
    not_run: versions without a result of the case.
    text: the statement as a sentence.
    """

    package: str
    where: str
    periods: tuple[Period, ...]
    not_run: tuple[str, ...]
    text: str

    @property
    def changes(self) -> bool:
        """Returns whether two versions that could run the case differ."""
        return len({(period.kind, period.known) for period in self.periods if period.kind not in NO_ANSWER}) > 1


@dataclass(frozen=True, kw_only=True)
class MergedCase:
    """A case with its result in each environment, which is a row of the merged report.

    outcomes: for each environment an index into the merged report's outcomes; null if it has no result.
    """

    id: str
    strategy: str
    offload: str
    staging: str
    direction: Direction
    method: str
    outcomes: tuple[int | None, ...]
    statements: tuple[Statement, ...]

    @property
    def changes(self) -> bool:
        return any(statement.changes for statement in self.statements)


@dataclass(frozen=True, kw_only=True)
class MergedReport:
    """Several reports, merged case by case.

    version: the version of fsdp-doctor that merged the reports.
    environments: sorted by device and version, the oldest first.
    outcomes: distinct outcomes; several cases may share an outcome.
    cases: sorted as they ran.
    """

    version: str
    environments: tuple[Environment, ...]
    outcomes: tuple[Outcome, ...]
    cases: tuple[MergedCase, ...]

    def find_outcome(self, case: MergedCase, environment: int) -> Outcome | None:
        """Finds the result in the environment with this index; None if the environment has no result."""
        index = case.outcomes[environment]
        return None if index is None else self.outcomes[index]

    def show(self, case: MergedCase, environment: int) -> Shown:
        """Returns the verdict in the environment with this index, or "not run"."""
        outcome = self.find_outcome(case, environment)
        return "not run" if outcome is None else outcome.kind

    def passes(self, case: MergedCase) -> bool:
        """Returns whether the case is ok or refused in every environment."""
        return all(kind in GOOD for kind in self._list_kinds(case))

    def fails(self, case: MergedCase) -> bool:
        """Returns whether the case has a bad verdict in some environment."""
        return any(kind not in GOOD | NO_ANSWER for kind in self._list_kinds(case))

    def has_run(self, case: MergedCase) -> bool:
        """Returns whether some environment could run the case."""
        return any(kind not in NO_ANSWER for kind in self._list_kinds(case))

    def _list_kinds(self, case: MergedCase) -> list[Shown]:
        return [self.show(case, number) for number in range(len(self.environments))]


def make_merged_schema() -> dict[str, Any]:
    """Makes the JSON schema of a merged report."""
    return make_document_schema(MergedReport, MERGED_SCHEMA, MERGED_SCHEMA_VERSION, "The merged report of fsdp-doctor")


def convert_merged_to_dict(merged: MergedReport) -> dict[str, Any]:
    return {"schema": MERGED_SCHEMA, "schema_version": MERGED_SCHEMA_VERSION, **msgspec.to_builtins(merged)}


def read_merged_dict(data: dict[str, Any]) -> MergedReport:
    """Reads a merged report from JSON values. Raises KeyError or ValueError for other values."""
    merged = msgspec.convert(data, MergedReport)
    for case in merged.cases:
        if len(case.outcomes) != len(merged.environments) or not all(
            index is None or 0 <= index < len(merged.outcomes) for index in case.outcomes
        ):
            raise ValueError(f"the outcomes of {case.id} do not match the report's outcomes and environments")
    return merged


def write_merged(path: pathlib.Path, merged: MergedReport) -> None:
    """Writes the report, compressed if the name ends in .gz. The same report always gives the same bytes.

    Raises DoctorFault if the file cannot be written; an older file is kept.
    """
    content = (json.dumps(convert_merged_to_dict(merged), indent=1) + "\n").encode()
    with turn_write_errors(path):
        replace_file(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def read_either(path: pathlib.Path) -> Report | MergedReport:
    """Reads a merged report or the report of one run. Raises UsageError for any other file."""
    with contextlib.suppress(OSError, EOFError, zlib.error, ValueError, RecursionError):
        data = read_json(path)
        if isinstance(data, dict) and data.get("schema") == MERGED_SCHEMA:
            return read_merged(path)
    return read_report(path)


def read_merged(path: pathlib.Path) -> MergedReport:
    """Reads a merged report from a file. Raises UsageError for any other file."""
    data = read_document(path, "merged report", MERGED_SCHEMA, MERGED_SCHEMA_VERSION)
    try:
        return read_merged_dict(data)
    except (KeyError, ValueError) as error:
        raise UsageError(f"{path} is a damaged merged report: {type(error).__name__}: {error}") from None


def render_environments(merged: MergedReport) -> Iterator[str]:
    """Yields one line for each environment, with the numbers of cases that were ok, were bad, or did not run."""
    for number, environment in enumerate(merged.environments):
        kinds = Counter(merged.show(case, number) for case in merged.cases)
        num_ok = sum(kinds[kind] for kind in GOOD)
        not_run = kinds["not run"] + sum(kinds[kind] for kind in NOT_RUN)
        unmeasurable = kinds["unmeasurable"]
        counts = f"{num_ok} ok, {kinds.total() - num_ok - not_run - unmeasurable} bad, {not_run} not run"
        counts += f", {unmeasurable} not measurable on the CPU" if unmeasurable else ""
        yield "\t".join(
            [environment.name, counts, *([] if environment.complete else [f"incomplete: {environment.ended}"])]
        )


def render_incomplete(merged: MergedReport) -> Iterator[str]:
    """Yields one line for each environment in which some of the selected cases did not run."""
    for environment in merged.environments:
        if not environment.complete:
            yield f"{environment.name}\tincomplete\t{environment.ended}"


def render_cases(merged: MergedReport) -> Iterator[str]:
    """Yields one line for each case: the statements on versions that ran it, else each environment's verdict."""
    for case in merged.cases:
        parts = [f"{statement.where}: {statement.text}" for statement in case.statements if statement.periods] or [
            f"{environment.name}: {merged.show(case, number)}"
            for number, environment in enumerate(merged.environments)
            if case.outcomes[number] is not None
        ]
        yield "\t".join([case.id, *parts])


def render_changed_cases(merged: MergedReport) -> Iterator[str]:
    """Yields one line for each case that changed, with the statements about the change."""
    for case in merged.cases:
        if case.changes:
            said = [f"{statement.where}: {statement.text}" for statement in case.statements if statement.changes]
            yield "\t".join([case.id, *said])


def render_changes(merged: MergedReport) -> Iterator[str]:
    """Yields one line for each way in which cases changed, with the first case and the number of others."""
    changed: dict[str, dict[str, None]] = {}
    for case in merged.cases:
        for statement in case.statements:
            if statement.changes:
                changed.setdefault(statement.text, {})[case.id] = None
    for text, (first, *others) in changed.items():
        yield "\t".join([text, first, *([f"and {len(others)} more"] if others else [])])


def summarize_merged(merged: MergedReport) -> str:
    """Returns a line with the numbers of cases and environments, and of cases that are ok in all environments."""
    passing = sum(merged.passes(case) for case in merged.cases)
    elsewhere = sum(
        not merged.passes(case) and not merged.fails(case) and merged.has_run(case) for case in merged.cases
    )
    failing = sum(merged.fails(case) for case in merged.cases)
    changed = sum(case.changes for case in merged.cases)
    missing = sum(None in case.outcomes for case in merged.cases)
    if len(merged.environments) > 1 and not any(case.statements for case in merged.cases):
        changes = (
            "no change is counted, because no two environments differ in the version of one package alone; "
            "`fsdp-doctor report diff` compares two reports"
        )
    else:
        changes = f"{changed} changed between two versions"
    return (
        f"{format_count(len(merged.cases), 'case')} in {format_count(len(merged.environments), 'environment')}: "
        f"{passing} ok in all, {elsewhere} only where they ran, {failing} bad in one or more, "
        f"{missing} without a result in one or more; {changes}"
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(make_merged_schema(), indent=2) + "\n")
