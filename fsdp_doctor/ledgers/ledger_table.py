"""Ledgers as a table for a terminal: a row for the end of each stage, one for its peak, one for the host."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_doctor.ledgers.jobs import JobLedgers, by_job, unit_for
from fsdp_doctor.ledgers.stage_ledger import Bytes, MemoryClass, StageLedger

_SHORT: dict[MemoryClass, str] = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer state": "optimizer",
    "unsharded parameters": "unsharded",
    "gathered outputs": "outputs",
    "communication buffers": "comm.",
}
# A table is as wide as what is in it, and nothing of it is cut.
_WIDEST = 400


def render_ledgers(ledgers: Iterable[StageLedger], color: bool = False) -> str:
    """A table for each job."""
    console = Console(
        width=_WIDEST,
        file=io.StringIO(),
        force_terminal=color,
        no_color=not color,
        highlight=False,
        legacy_windows=False,
    )
    for job in by_job(ledgers):
        console.print(_title(job), soft_wrap=True)
        console.print(_table(job))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def _title(job: JobLedgers) -> Text:
    unit, size = unit_for(job.highest)
    limit = f", of {_number(job.capacity, size)} {unit} on the device" if job.capacity else ""
    return Text(f"{job.job}, {unit}, the rank that comes highest{limit}", style="bold")


def _table(job: JobLedgers) -> Table:
    _, size = unit_for(job.highest)
    table = Table(pad_edge=False, box=box.SIMPLE_HEAD)
    table.add_column("stage", no_wrap=True)
    for name in ("", "all", *(_SHORT.get(one, one) for one in job.classes), "reserved", "elsewhere"):
        table.add_column(name, no_wrap=True, justify="left" if not name else "right")
    for ledger in job.stages:
        for row in _rows(ledger, job.classes, size):
            table.add_row(*row)
    return table


def _rows(ledger: StageLedger, classes: tuple[MemoryClass, ...], size: int) -> list[list[str]]:
    rows = []
    if (device := ledger.device) is not None:
        kept = [_number(device.reserved, size), _number(device.elsewhere, size)]
        rows += [["held", _number(device.allocated, size), *_cells(device.held, classes, size), *kept]]
        rows += [["peak", _number(device.peak, size), *_cells(device.at_peak, classes, size)]]
        rows[-1] += [_number(device.peak_reserved, size), ""]
    host = ledger.host
    if host.pinned_reserved + host.pageable:
        taken = host.pinned_reserved + host.pageable
        pinned = f"pinned {_number(host.pinned, size)}" if host.pinned else ""
        rows += [["host", _number(host.pinned + host.pageable, size), *_cells(host.held, classes, size)]]
        rows[-1] += [_number(taken, size), pinned]
    return [[ledger.name if not number else "", *row] for number, row in enumerate(rows)]


def _cells(held: Bytes, classes: tuple[MemoryClass, ...], size: int) -> list[str]:
    return [_number(held.get(name) or None, size) for name in classes]


def _number(nbytes: int | None, size: int) -> str:
    if nbytes is None:
        return ""
    value = nbytes / size
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
