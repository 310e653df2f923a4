"""Writes the file of a report during the run and at its end, so that a finished case is never lost.

At the start, FILE is written with ``complete: false``. Each finished case is appended to FILE.journal at once. At the
end the whole report replaces FILE, and the journal is removed. A reader of FILE also reads its journal.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import IO, Any

import msgspec

from fsdp_doctor.errors import DoctorFault, UsageError
from fsdp_doctor.report.document import (
    SCHEMA,
    SCHEMA_VERSION,
    CaseResult,
    Report,
    convert_report_to_dict,
    read_report_dict,
    read_result_dict,
)


def name_journal(path: pathlib.Path) -> pathlib.Path:
    """Returns the file that holds a run's finished cases until its report at ``path`` is complete."""
    return path.with_name(path.name + ".journal")


class Journal:
    """Appends results to the journal of ``path``. Raises DoctorFault if a result cannot be written."""

    def __init__(self, path: pathlib.Path, report: Report) -> None:
        self._path = path
        _start_report(path, report)
        with turn_write_errors(name_journal(path)):
            self._file: IO[str] = open(name_journal(path), "w", encoding="utf-8")
        for result in report.results:
            self.add(result)

    def add(self, result: CaseResult) -> None:
        with turn_write_errors(name_journal(self._path)):
            self._file.write(json.dumps(msgspec.to_builtins(result)) + "\n")
            self._file.flush()

    def close(self, report: Report) -> None:
        """Writes the whole report, which includes the contents of the journal."""
        with contextlib.suppress(OSError):
            self._file.close()
        write_report(self._path, report)


def write_report(path: pathlib.Path, report: Report) -> None:
    """Writes a report to ``path``, without a journal. Raises DoctorFault if the report cannot be written."""
    _start_report(path, report)
    with contextlib.suppress(OSError):
        name_journal(path).unlink()


def _start_report(path: pathlib.Path, report: Report) -> None:
    """Writes a report to which no older journal can add results.

    If the report has no results, an existing journal is from an older run, and is emptied first. Otherwise the report
    may have been made from the journal, which is kept until the report is written.
    """
    journal = name_journal(path)
    with turn_write_errors(path):
        if not report.results and journal.exists():
            journal.write_text("")
        replace_file(path, json.dumps(convert_report_to_dict(report), indent=1) + "\n")


def read_report(path: pathlib.Path) -> Report:
    """Reads a report, together with the journal if the report is incomplete.

    A file whose name ends in .gz is decompressed.

    Raises UsageError for a file that is not a report.
    """
    data = read_document(path, "report", SCHEMA, SCHEMA_VERSION)
    try:
        if not data["complete"]:
            data["results"] = _choose_longer(data["results"], name_journal(path))
        return read_report_dict(data)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is a damaged report: {type(error).__name__}: {error}") from None


def _choose_longer(results: list[Any], journal: pathlib.Path) -> list[Any]:
    """Returns the journal's results or ``results``, whichever has more entries. The journal's last line may be
    incomplete.
    """
    in_journal = []
    with contextlib.suppress(OSError):
        for line in journal.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                data = json.loads(line)
                read_result_dict(data)
                in_journal.append(data)
    return in_journal if len(in_journal) > len(results) else results


def read_document(path: pathlib.Path, kind: str, schema: str, version: int) -> dict[str, Any]:
    """Reads a JSON document of fsdp-doctor with one version of its schema. Raises UsageError for any other file.

    kind: the name of the kind of document, for messages.
    """
    try:
        data = read_json(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UsageError(f"cannot read the {kind} {path}: {reason or error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a {kind} of fsdp-doctor: it is not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("schema") != schema:
        raise UsageError(f"{path} is not a {kind} of fsdp-doctor: its 'schema' is not {schema!r}")
    found = data.get("schema_version")
    if type(found) is not int or found != version:
        raise UsageError(
            f"{path} has schema version {found}, but this fsdp-doctor reads {version}: upgrade fsdp-doctor"
        )
    return data


def read_json(path: pathlib.Path) -> Any:
    """Reads JSON, which is decompressed if the name ends in .gz.

    Raises OSError, EOFError, zlib.error, ValueError or RecursionError.
    """
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def replace_file(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a temporary file next to ``path`` and renames it, so that a reader never sees an incomplete file.

    If the file cannot be written, raises OSError and leaves the old file unchanged.
    """
    beside = path.with_name(path.name + ".new")
    if path.exists() and not path.is_file():
        # A rename would even replace a device or a pipe.
        raise OSError(errno.EINVAL, "it exists, but is not a regular file")
    try:
        with open(beside, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


@contextlib.contextmanager
def turn_write_errors(path: pathlib.Path) -> Iterator[None]:
    """Converts an OSError to DoctorFault, because results that cannot be written are lost."""
    try:
        yield
    except OSError as error:
        raise DoctorFault(f"cannot write {path}: {error.strerror or error}") from None
