"""Writes the report during a run: its files, and the progress on a terminal or in a pipe."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fsdp_doctor.errors import DoctorFault
from fsdp_doctor.machine.environment import EnvironmentFacts
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.report import formats
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.formats import AnyFormat
from fsdp_doctor.report.journal import Journal, turn_write_errors, write_report
from fsdp_doctor.text import format_count

_SECONDS_BETWEEN_LINES = 30.0


class ReportWriter:
    """Collects the results of a run, and writes every file at its end.

    A JSON report gets each result as soon as it is known.

    report: the report before the run, with the results of an earlier run that this run continues.
    cases: all cases of the run.
    outputs: maps each format to its file.
    """

    def __init__(self, report: Report, cases: Sequence[AnyCase], outputs: Mapping[AnyFormat, pathlib.Path]) -> None:
        self._report = report
        self._cases = cases
        self._places = {case.id: place for place, case in enumerate(cases)}
        self._outputs = outputs
        self._results = list(report.results)
        self._start = time.monotonic()
        self._fault: DoctorFault | None = None
        self._journal: Journal | None = None
        self.is_open = False

    def list_numbers_to_run(self) -> list[int]:
        """Lists the cases without a result, as indices into the list of all cases."""
        done = {result.id for result in self._results}
        return [number for number, case in enumerate(self._cases) if case.id not in done]

    def open(self, facts: EnvironmentFacts) -> None:
        """Starts to write results to disk.

        facts: facts about the environment that only the workers know.
        """
        self.is_open = True
        self._report = dataclasses.replace(self._report, environment=self._report.environment | facts)
        with self._keep_fault():
            if "json" in self._outputs:
                self._journal = Journal(self._outputs["json"], self._report)

    def add(self, result: CaseResult) -> None:
        self._results.append(result)
        with self._keep_fault():
            if self._journal is not None and self._fault is None:
                self._journal.add(result)

    def finish(
        self, ended: str, expected: Callable[[Report], Collection[str]] = lambda report: ()
    ) -> tuple[Report, DoctorFault | None]:
        """Writes every file. Returns the report, and the first fault in writing or None.

        expected: a function that returns the ids of a report's bad cases that were expected.
        """
        report = dataclasses.replace(
            self._report,
            results=tuple(sorted(self._results, key=lambda result: self._places[result.id])),
            complete=not self.list_numbers_to_run(),
            ended=ended,
            seconds=round(self._report.seconds + time.monotonic() - self._start, 3),
        )
        for name, path in self._outputs.items():
            with self._keep_fault():
                if name != "json":
                    with turn_write_errors(path):
                        path.write_text(formats.render(report, name, expected=expected(report)), encoding="utf-8")
                elif self._journal is not None:
                    self._journal.close(report)
                else:
                    write_report(path, report)
        return report, self._fault

    @contextlib.contextmanager
    def _keep_fault(self) -> Iterator[None]:
        """Keeps the first fault in writing a file, so that the run continues; the results still go to stdout."""
        try:
            yield
        except DoctorFault as fault:
            if self._fault is None:
                sys.stderr.write(f"fsdp-doctor: {fault}; the run goes on\n")
            self._fault = self._fault or fault


@contextlib.contextmanager
def print_progress(total: int, now: Callable[[], float] = time.monotonic) -> Iterator[Callable[[CaseResult], None]]:
    """Shows on stderr how many cases have finished, how many were bad, and the time left.

    On a terminal the progress is a bar; elsewhere it is a line every 30 seconds. The block receives a function that
    must be called with each result. No thread is used, because workers are forked during the run.
    """
    with _show_bar(total) if sys.stderr.isatty() else _print_lines(total, now) as add:
        yield add


@contextlib.contextmanager
def _show_bar(total: int) -> Iterator[Callable[[CaseResult], None]]:
    bar = Progress(
        TextColumn("probe"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("[red]{task.fields[bad]} bad[/red]"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[case]}"),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
    )
    task = bar.add_task("probe", total=total, bad=0, case="starting the workers")
    num_bad = 0

    def add(result: CaseResult) -> None:
        nonlocal num_bad
        num_bad += result.verdict.bad
        bar.update(task, advance=1, bad=num_bad, case=result.id, refresh=True)

    with bar:
        bar.refresh()
        yield add


@contextlib.contextmanager
def _print_lines(total: int, now: Callable[[], float]) -> Iterator[Callable[[CaseResult], None]]:
    begin = last = now()
    num_done = num_bad = 0

    def add(result: CaseResult) -> None:
        nonlocal last, num_done, num_bad
        num_done, num_bad = num_done + 1, num_bad + result.verdict.bad
        if now() - last < _SECONDS_BETWEEN_LINES or num_done == total:
            return
        last = now()
        minutes = (last - begin) / num_done * (total - num_done) / 60
        left = f"about {minutes:.0f} min left" if minutes >= 1 else "less than a minute left"
        sys.stderr.write(f"fsdp-doctor: {num_done} of {format_count(total, 'case')}, {num_bad} bad, {left}\n")
        sys.stderr.flush()

    yield add
