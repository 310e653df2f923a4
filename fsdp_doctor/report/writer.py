"""The report while it grows: kept on disk where the user wants it."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from fsdp_doctor.errors import DoctorFault
from fsdp_doctor.machine.environment import EnvironmentFacts
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.report import formats
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.formats import Format
from fsdp_doctor.report.journal import Journal, write_report


class ReportWriter:
    """Takes a run's results one by one, and writes every file at its end; a JSON report's cases as they come.

    report: as it is before the run, with the results that are gone on with. cases: all that the run is to have.
    outputs: files by format.
    """

    def __init__(self, report: Report, cases: Sequence[Case], outputs: Mapping[Format, pathlib.Path]) -> None:
        self._report = report
        self._cases = cases
        self._outputs = outputs
        self._results = list(report.results)
        self._start = time.monotonic()
        self._lost: DoctorFault | None = None
        self._journal: Journal | None = None
        self.is_open = False

    def numbers_to_run(self) -> list[int]:
        """The cases without a result: places in the list of all."""
        done = {result.case for result in self._results}
        return [number for number, case in enumerate(self._cases) if case not in done]

    def open(self, facts: EnvironmentFacts) -> None:
        """The workers have started and told what they found: from here on results are kept on disk."""
        self.is_open = True
        self._report = dataclasses.replace(self._report, environment=self._report.environment | facts)
        with self._noting_a_full_disk():
            if "json" in self._outputs:
                self._journal = Journal(self._outputs["json"], self._report)

    def add(self, result: CaseResult) -> None:
        self._results.append(result)
        with self._noting_a_full_disk():
            if self._journal is not None and self._lost is None:
                self._journal.add(result)

    def finish(
        self, ended: str, expected: Callable[[Report], Collection[str]] = lambda report: ()
    ) -> tuple[Report, DoctorFault | None]:
        """Writes every file; returns the report, and what could not be written.

        expected: the ids of a report's bad cases that are as they were expected.
        """
        report = dataclasses.replace(
            self._report,
            results=tuple(self._results),
            complete=not self.numbers_to_run(),
            ended=ended,
            seconds=round(self._report.seconds + time.monotonic() - self._start, 3),
        )
        for name, path in self._outputs.items():
            with self._noting_a_full_disk():
                if name != "json":
                    _write(path, formats.render(report, name, expected=expected(report)))
                elif self._journal is not None:
                    self._journal.close(report)
                else:
                    write_report(path, report)
        return report, self._lost

    @contextlib.contextmanager
    def _noting_a_full_disk(self) -> Iterator[None]:
        """A file that cannot be written does not end the run: the results still go to stdout."""
        try:
            yield
        except DoctorFault as fault:
            if self._lost is None:
                sys.stderr.write(f"fsdp-doctor: {fault}; the run goes on\n")
            self._lost = self._lost or fault


def _write(path: pathlib.Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DoctorFault(f"cannot write {path}: {error.strerror or error}") from None
