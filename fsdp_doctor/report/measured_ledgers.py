"""The ledgers of a report: as a table, as a picture, and as a file of their own."""

from __future__ import annotations

from fsdp_doctor.ledgers.ledger import LedgerFile, StageLedger
from fsdp_doctor.ledgers.ledger_views import ledgers_svg, render_ledgers
from fsdp_doctor.report.document import Report
from fsdp_doctor.report.layout import printable


def ledgers_of(report: Report) -> tuple[StageLedger, ...]:
    return tuple(ledger for result in report.results for ledger in result.ledgers)


def ledger_file(report: Report) -> LedgerFile:
    accelerators = report.environment.get("accelerators") or [report.device]
    return LedgerFile(
        origin="measured",
        command=report.command,
        device=f"{report.world_size} x {accelerators[0]}",
        ledgers=ledgers_of(report),
        packages=report.environment.get("packages", {}),
        notes=(*report.notes, *_not_measured(report)),
    )


def ledger_text(report: Report, color: bool) -> str:
    """The tables, and a line for each case that broke."""
    lines = "".join(f"{printable(line)}\n" for line in _not_measured(report))
    return render_ledgers(ledgers_of(report), color) + lines


def ledger_picture(report: Report) -> str:
    """As SVG; empty where nothing was watched."""
    found = ledgers_of(report)
    return ledgers_svg(found) if found else ""


def _not_measured(report: Report) -> list[str]:
    return [
        f"{result.id}: {result.verdict.kind}: {result.verdict.reason}"
        for result in report.results
        if result.verdict.bad or not result.ledgers
    ]
