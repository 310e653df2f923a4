"""The formats of a report by name, and the short ones: a line for each case, and the ledgers of memory."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, TypeAlias, get_args

from typing_extensions import assert_never

from fsdp_doctor.ledgers.ledger import LedgerFile, StageLedger, ledgers_to_json
from fsdp_doctor.report.document import CaseResult, Report, report_to_dict
from fsdp_doctor.report.layout import bytes_text, fixes, printable, seconds_text

Format: TypeAlias = Literal[
    "table",  # the matrix, for a terminal
    "lines",  # one line for each case, never cut
    "json",  # everything; the other formats can be made from it
    "markdown",  # for a GitHub issue
    "junit",  # JUnit XML, for CI systems
    "svg",  # the matrix as a picture
    "github",  # annotations for GitHub Actions
    "memory",  # with --memory, the memory held at each stage, for a terminal
    "memory-svg",  # the same as a picture
    "ledgers",  # the same as JSON, of every rank
]
FORMATS: tuple[Format, ...] = get_args(Format)
_NARROWEST = 60


def render(
    report: Report,
    name: Format,
    *,
    width: int = 132,
    color: bool = False,
    unexpected: Sequence[str] = (),
    expected: Collection[str] = (),
) -> str:
    """Renders the report in a format, ending in a newline.

    width, color: of the table; the width in columns. unexpected: sentences on unexpected results, for annotations.
    expected: the ids of bad cases that were expected; JUnit does not count them as failures.
    """
    # Imported here: rich costs `fsdp-doctor list` a third of its time, and `list` renders nothing.
    from fsdp_doctor.ledgers.ledger_views import ledgers_svg, render_ledgers
    from fsdp_doctor.report import github, junit, markdown, table
    from fsdp_doctor.report.heat_map import render_heat_map

    match name:
        case "table":
            return table.render(report, max(width, _NARROWEST), color)
        case "lines":
            return printable(case_lines(report))
        case "json":
            return json.dumps(report_to_dict(report), indent=1) + "\n"
        case "markdown":
            return printable(markdown.render(report)).rstrip("\n") + "\n"
        case "junit":
            return junit.render(report, expected)
        case "svg":
            return render_heat_map(report) + "\n"
        case "github":
            return github.workflow_commands(report, unexpected)
        case "memory":
            lines = "".join(f"{printable(line)}\n" for line in _cases_without_ledgers(report))
            return render_ledgers(_ledgers(report), color) + lines
        case "memory-svg":
            return ledgers_svg(_ledgers(report))
        case "ledgers":
            return ledgers_to_json(_ledger_file(report))
        case _:
            assert_never(name)


def ledger_picture(report: Report) -> str:
    """The ledgers as SVG; empty if the report has none."""
    return render(report, "memory-svg") if _ledgers(report) else ""


def _ledgers(report: Report) -> tuple[StageLedger, ...]:
    return tuple(ledger for result in report.results for ledger in result.ledgers)


def _ledger_file(report: Report) -> LedgerFile:
    accelerators = report.environment.get("accelerators") or [report.device]
    return LedgerFile(
        origin="measured",
        command=report.command,
        device=f"{report.world_size} x {accelerators[0]}",
        ledgers=_ledgers(report),
        packages=report.packages,
        notes=(*report.notes, *_cases_without_ledgers(report)),
    )


def _cases_without_ledgers(report: Report) -> Iterator[str]:
    """A sentence for each case whose ledgers are missing or end early."""
    for result in report.results:
        if result.verdict.bad or not result.ledgers:
            yield f"{result.id}: {result.verdict.kind}: {result.verdict.reason}"


def case_lines(report: Report) -> str:
    """One line for each case: for logs, pipes and grep."""
    fix_of = fixes(report)
    return "".join(_case_line(result, fix_of.get(result.id)) + "\n" for result in report.results)


def _case_line(result: CaseResult, fix: CaseResult | None) -> str:
    verdict = result.verdict
    parts = [result.id, verdict.kind, seconds_text(result.seconds), bytes_text(result.peak_extra_bytes)]
    if fix is not None and fix is not result:
        parts += ["fix", fix.verdict.kind, seconds_text(fix.seconds), bytes_text(fix.peak_extra_bytes)]
    if result.confirmation is not None:
        parts.append("confirmed" if result.confirmed else f"not confirmed: then {result.confirmation.kind}")
    parts += [" ".join(text.split()) for text in (verdict.reason, *verdict.also) if text]
    parts += [f"known: {result.known}"] if result.known else []
    return "\t".join(parts)
