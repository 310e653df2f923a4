"""The merged report of several runs: its records, its JSON file and its schema.

Of each result it keeps what a user would act on. A file name that ends in .gz is compressed. ``python -m
fsdp_doctor.versions.merged`` writes ``merged_schema.json``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import inspect
import json
import pathlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from fsdp_doctor.errors import DoctorFault, UsageError
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.report.document import Report
from fsdp_doctor.report.journal import read_report
from fsdp_doctor.report.schema import verdict_kinds
from fsdp_doctor.report.stored_document import read_document, read_json
from fsdp_doctor.report.type_schemas import DRAFT, JsonSchema, TypeSchemas
from fsdp_doctor.report.whole_file import replace_file
from fsdp_doctor.verdict.classification import GOOD, NOT_RUN, VerdictKind, verdict_of_version_1

MERGED_SCHEMA = "fsdp-doctor/merged"
# Since version 2 there is the verdict "refused".
MERGED_SCHEMA_VERSION = 2

# The end of a message that was cut.
SHORTENED = " ..."

# Shown instead of the device of an environment that could not be made.
NOWHERE = "not run"
# "not run": the environment has no result of the case, or could not be made.
Shown: TypeAlias = VerdictKind | Literal["not run"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An environment in which cases ran: a column.

    name: no other environment of the merged report has it. torch: its version, as it says it itself.
    device: the device type. accelerators: their names. packages: versions by package, torch's among them.
    version: of fsdp-doctor. command: that ran it. rerun_options: what a command that runs one case alone needs
    besides ``--case``. created: ISO 8601, of the last report. reports: its reports, as paths from the merged report
    where they are known, else as file names. notes: what a reader must know to read the verdicts right.
    complete: whether every selected case has a result. ended: what ended an incomplete run, or why there was none.
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
    """The result of a case.

    ranks: the ones that the reason speaks of. also: what was found or followed besides.
    message: ``Type: message`` of the exception, cut to 1,000 characters; empty where none was raised.
    known: the id of the catalogue's entry that a bad verdict shows; empty where there is none.
    """

    kind: VerdictKind
    reason: str
    ranks: tuple[int, ...]
    also: tuple[str, ...]
    message: str
    known: str


@dataclass(frozen=True, kw_only=True)
class Period:
    """Successive versions with the same verdict and entry.

    since, until: the oldest and the newest of them, perhaps the same.
    """

    kind: VerdictKind
    known: str
    since: str
    until: str


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The verdicts of a case with each version of one package, everything else being equal.

    package: ``torch`` or another. where: the device, the ranks, and what else tells this row of versions from others.
    periods: in the order of the versions; without one nothing ran. not_run: versions of which the case has no result.
    text: the same as a sentence.
    """

    package: str
    where: str
    periods: tuple[Period, ...]
    not_run: tuple[str, ...]
    text: str

    @property
    def changes(self) -> bool:
        """Whether two versions that could run the case differ."""
        return len({(period.kind, period.known) for period in self.periods if period.kind not in NOT_RUN}) > 1


@dataclass(frozen=True, kw_only=True)
class MergedCase:
    """A case with its result in each environment: a row.

    outcomes: for each environment the index of one of the merged report's outcomes, null where the case has no result.
    """

    id: str
    strategy: str
    offload: str
    staging: str
    direction: Direction
    path: str
    outcomes: tuple[int | None, ...]
    statements: tuple[Statement, ...]


@dataclass(frozen=True, kw_only=True)
class MergedReport:
    """Several reports, case by case.

    version: of the fsdp-doctor that merged them. environments: by device and version, oldest first.
    outcomes: each once, however many cases showed it. cases: in the order in which they ran.
    """

    version: str
    environments: tuple[Environment, ...]
    outcomes: tuple[Outcome, ...]
    cases: tuple[MergedCase, ...]

    def outcome(self, case: MergedCase, environment: int) -> Outcome | None:
        """The result in the environment of that index; None if there is none."""
        index = case.outcomes[environment]
        return None if index is None else self.outcomes[index]

    def shown(self, case: MergedCase, environment: int) -> Shown:
        """The verdict in that environment, or "not run"."""
        outcome = self.outcome(case, environment)
        return "not run" if outcome is None else outcome.kind

    def passes(self, case: MergedCase) -> bool:
        """Whether the case is as it should be in every environment: one that did not run it is none."""
        return all(kind in GOOD for kind in self._kinds(case))

    def fails(self, case: MergedCase) -> bool:
        """Whether the case has a bad verdict in some environment."""
        return any(kind != "not run" and kind not in GOOD | NOT_RUN for kind in self._kinds(case))

    def ran(self, case: MergedCase) -> bool:
        """Whether some environment could run the case."""
        return any(kind != "not run" and kind not in NOT_RUN for kind in self._kinds(case))

    def _kinds(self, case: MergedCase) -> list[Shown]:
        return [self.shown(case, number) for number in range(len(self.environments))]


MERGED_SCHEMA_FILE = pathlib.Path(__file__).with_name("merged_schema.json")

_DEFINITIONS: dict[Any, str] = {
    VerdictKind: "verdict_kind",
    Environment: "environment",
    Outcome: "outcome",
    Period: "period",
    Statement: "statement",
    MergedCase: "case",
}
_TYPES = TypeSchemas(definitions=_DEFINITIONS)


def merged_schema() -> JsonSchema:
    """The schema, of the version that :func:`fsdp_doctor.versions.merged.merged_to_dict` writes."""
    head = {"schema": {"const": MERGED_SCHEMA}, "schema_version": {"enum": list(range(1, MERGED_SCHEMA_VERSION + 1))}}
    merged = _TYPES.of_object(MergedReport)
    types = {name: _TYPES.of_object(kind) for kind, name in _DEFINITIONS.items() if kind is not VerdictKind}
    return {
        "$schema": DRAFT,
        "title": f"The merged report of fsdp-doctor, schema version {MERGED_SCHEMA_VERSION}",
        **merged,
        "properties": head | merged["properties"],
        "required": [*head, *merged["required"]],
        "$defs": {"verdict_kind": verdict_kinds(), **types},
    }


def merged_schema_text() -> str:
    """The text of ``merged_schema.json``."""
    return json.dumps(merged_schema(), indent=2) + "\n"


if __name__ == "__main__":
    MERGED_SCHEMA_FILE.write_text(merged_schema_text(), encoding="utf-8")


_Kind = TypeVar("_Kind")


def merged_to_dict(merged: MergedReport) -> dict[str, Any]:
    return {"schema": MERGED_SCHEMA, "schema_version": MERGED_SCHEMA_VERSION, **dataclasses.asdict(merged)}


def merged_from_dict(data: dict[str, Any]) -> MergedReport:
    """Raises KeyError, TypeError or ValueError for what :func:`merged_to_dict` does not write.

    The verdicts of an older version of the schema are restated, and so is what changed from version to version.
    """
    # It works with the records of this module.
    from fsdp_doctor.versions.merging import merge

    num_outcomes, num_environments = len(data["outcomes"]), len(data["environments"])
    cases = tuple(_read_case(case) for case in data["cases"])
    for case in cases:
        if len(case.outcomes) != num_environments or not all(
            index is None or 0 <= index < num_outcomes for index in case.outcomes
        ):
            raise ValueError(f"{case.id} has other outcomes or environments than the report")
    merged = MergedReport(
        version=data["version"],
        environments=tuple(_make_record(Environment, environment) for environment in data["environments"]),
        outcomes=tuple(map(_read_outcome, data["outcomes"])),
        cases=cases,
    )
    if data["schema_version"] == MERGED_SCHEMA_VERSION:
        return merged
    return dataclasses.replace(merge({"": merged}), version=merged.version)


def write_merged(path: pathlib.Path, merged: MergedReport) -> None:
    """Writes the same bytes for the same report. Raises DoctorFault where the disk is full; an older file stays."""
    text = json.dumps(merged_to_dict(merged), indent=1) + "\n"
    content = text.encode()
    try:
        replace_file(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    except OSError as error:
        raise DoctorFault(f"cannot write {path}: {error.strerror or error}") from None


def read_either(path: pathlib.Path) -> Report | MergedReport:
    """Reads a merged report or that of one run, whichever it is. Raises UsageError for anything else."""
    with contextlib.suppress(OSError, EOFError, zlib.error, ValueError, RecursionError):
        data = read_json(path)
        if isinstance(data, dict) and data.get("schema") == MERGED_SCHEMA:
            return read_merged(path)
    return read_report(path)


def read_merged(path: pathlib.Path) -> MergedReport:
    """Raises UsageError for anything but a merged report of this version of the schema or an older one."""
    data = read_document(path, "merged report", MERGED_SCHEMA, MERGED_SCHEMA_VERSION)
    try:
        return merged_from_dict(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is a damaged merged report: {type(error).__name__}: {error}") from None


def _read_case(data: dict[str, Any]) -> MergedCase:
    statements = tuple(map(_read_statement, data["statements"]))
    return _make_record(MergedCase, {**data, "statements": statements})


def _read_outcome(data: dict[str, Any]) -> Outcome:
    outcome = _make_record(Outcome, data)
    kind, reason = verdict_of_version_1(outcome.kind, outcome.reason)
    return dataclasses.replace(outcome, kind=kind, reason=reason)


def _read_statement(data: dict[str, Any]) -> Statement:
    return _make_record(
        Statement, {**data, "periods": tuple(_make_record(Period, period) for period in data["periods"])}
    )


def _make_record(kind: Callable[..., _Kind], data: dict[str, Any]) -> _Kind:
    """Makes a dataclass from its fields, with tuples for JSON's arrays."""
    fields = {name: data[name] for name in inspect.signature(kind).parameters}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
