"""The merged report as a JSON file; a name that ends in .gz is gzip's."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import inspect
import json
import pathlib
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from fsdp_doctor.errors import DoctorFault, UsageError
from fsdp_doctor.report.document import Report
from fsdp_doctor.report.journal import read_report
from fsdp_doctor.report.stored_document import read_document, read_json
from fsdp_doctor.report.whole_file import replace_file
from fsdp_doctor.verdict.classification import verdict_of_version_1
from fsdp_doctor.versions.merged import (
    MERGED_SCHEMA,
    MERGED_SCHEMA_VERSION,
    Environment,
    MergedCase,
    MergedReport,
    Outcome,
    Period,
    Statement,
)
from fsdp_doctor.versions.merging import merge

_Kind = TypeVar("_Kind")


def merged_to_dict(merged: MergedReport) -> dict[str, Any]:
    return {"schema": MERGED_SCHEMA, "schema_version": MERGED_SCHEMA_VERSION, **dataclasses.asdict(merged)}


def merged_from_dict(data: dict[str, Any]) -> MergedReport:
    """Raises KeyError, TypeError or ValueError for what :func:`merged_to_dict` does not write.

    What an older version called otherwise is restated, and so is what changed from version to version.
    """
    num_outcomes, num_environments = len(data["outcomes"]), len(data["environments"])
    cases = tuple(_case(case) for case in data["cases"])
    for case in cases:
        if len(case.outcomes) != num_environments or not all(
            index is None or 0 <= index < num_outcomes for index in case.outcomes
        ):
            raise ValueError(f"{case.id} has other outcomes or environments than the report")
    merged = MergedReport(
        version=data["version"],
        environments=tuple(_made(Environment, environment) for environment in data["environments"]),
        outcomes=tuple(map(_outcome, data["outcomes"])),
        cases=cases,
    )
    if data["schema_version"] == MERGED_SCHEMA_VERSION:
        return merged
    return dataclasses.replace(merge({"": merged}), version=merged.version)


def write_merged(path: pathlib.Path, merged: MergedReport) -> None:
    """The same bytes for the same report. Raises DoctorFault where the disk does not take it; what was there stays."""
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


def _case(data: dict[str, Any]) -> MergedCase:
    statements = tuple(_statement(one) for one in data["statements"])
    return _made(MergedCase, {**data, "statements": statements})


def _outcome(data: dict[str, Any]) -> Outcome:
    outcome = _made(Outcome, data)
    kind, reason = verdict_of_version_1(outcome.kind, outcome.reason)
    return dataclasses.replace(outcome, kind=kind, reason=reason)


def _statement(data: dict[str, Any]) -> Statement:
    return _made(Statement, {**data, "periods": tuple(_made(Period, period) for period in data["periods"])})


def _made(kind: Callable[..., _Kind], data: dict[str, Any]) -> _Kind:
    """A dataclass of its fields, with tuples for JSON's arrays."""
    fields = {name: data[name] for name in inspect.signature(kind).parameters}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
