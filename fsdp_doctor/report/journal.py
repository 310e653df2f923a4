"""The report file while the run lasts and after it: no finished case is lost, whatever happens.

FILE is written at the start, with ``complete: false``; each finished case is appended to
FILE.journal at once; at the end FILE is replaced by the whole report and the journal removed.
Reading FILE takes a journal beside it into account.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import IO, Any

from fsdp_doctor.errors import DoctorFault, UsageError
from fsdp_doctor.report.document import (
    SCHEMA,
    SCHEMA_VERSION,
    CaseResult,
    Report,
    report_from_dict,
    report_to_dict,
    result_from_dict,
    result_to_dict,
)
from fsdp_doctor.report.stored_document import read_document
from fsdp_doctor.report.whole_file import replace_file


def journal_of(path: pathlib.Path) -> pathlib.Path:
    """Where the finished cases of a run are while its report at ``path`` is not complete."""
    return path.with_name(path.name + ".journal")


class Journal:
    """Appends results to the journal of ``path``. Raises DoctorFault where the disk does not take them."""

    def __init__(self, path: pathlib.Path, report: Report) -> None:
        self._path = path
        _begin(path, report)
        with _writing(journal_of(path)):
            self._file: IO[str] = open(journal_of(path), "w", encoding="utf-8")
        for result in report.results:
            self.add(result)

    def add(self, result: CaseResult) -> None:
        with _writing(journal_of(self._path)):
            self._file.write(json.dumps(result_to_dict(result)) + "\n")
            self._file.flush()

    def close(self, report: Report) -> None:
        """Writes the whole report, which has everything that the journal has."""
        with contextlib.suppress(OSError):
            self._file.close()
        write_report(self._path, report)


def write_report(path: pathlib.Path, report: Report) -> None:
    """Writes a report to ``path``, without a journal beside it. Raises DoctorFault where the disk does not take it."""
    _begin(path, report)
    with contextlib.suppress(OSError):
        journal_of(path).unlink()


def _begin(path: pathlib.Path, report: Report) -> None:
    """Puts a report at ``path`` whose results no journal beside it adds to.

    Of a report that has none, what an older run left in the journal would be taken for its results: that goes first.
    A journal that the report was made from must stay until the report is there.
    """
    journal = journal_of(path)
    with _writing(path):
        if not report.results and journal.exists():
            journal.write_text("")
        replace_file(path, json.dumps(report_to_dict(report), indent=1) + "\n")


def read_report(path: pathlib.Path) -> Report:
    """Reads a report, a partial one with its journal too; a name that ends in .gz is gzip's.

    Raises UsageError for anything else.
    """
    data = read_document(path, "report", SCHEMA, SCHEMA_VERSION)
    try:
        if not data["complete"]:
            data["results"] = _with_journal(data["results"], journal_of(path))
        return report_from_dict(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is a damaged report: {type(error).__name__}: {error}") from None


def _with_journal(results: list[Any], journal: pathlib.Path) -> list[Any]:
    """The journal's results where it has more than the file; its last line may be half written."""
    found = []
    with contextlib.suppress(OSError):
        for line in journal.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                data = json.loads(line)
                result_from_dict(data)
                found.append(data)
    return found if len(found) > len(results) else results


@contextlib.contextmanager
def _writing(path: pathlib.Path) -> Iterator[None]:
    """Turns an OSError into the doctor's own fault: results that cannot be kept are lost."""
    try:
        yield
    except OSError as error:
        raise DoctorFault(f"cannot write {path}: {error.strerror or error}") from None
