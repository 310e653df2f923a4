"""The live line on a terminal: cases done, bad so far, time left. Nothing where stderr is no terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeRemainingColumn

from fsdp_doctor.report.document import CaseResult


class Progress:
    """A context manager. It has no thread of its own: a worker is forked while it is shown."""

    def __init__(self, total: int) -> None:
        self._bad = 0
        self._bar = Bar(
            TextColumn("probe"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("[red]{task.fields[bad]} bad[/red]"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[case]}"),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("probe", total=total, bad=0, case="starting the workers")

    def __enter__(self) -> Progress:
        self._bar.start()
        self._bar.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def add(self, result: CaseResult) -> None:
        self._bad += result.verdict.bad
        self._bar.update(self._task, advance=1, bad=self._bad, case=result.id, refresh=True)
