"""Renders a report in a named format, and defines the short formats: one line per case, and the ledgers of memory."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, TypeAlias, get_args

from typing_extensions import assert_never

from fsdp_doctor.examination.memory_records import MemoryFile, StageMemory, format_memory_file
from fsdp_doctor.report.document import Report, convert_report_to_dict
from fsdp_doctor.report.layout import find_fixes
from fsdp_doctor.text import format_bytes, format_seconds, make_printable

Format: TypeAlias = Literal[
    "table",  # the matrix, for a terminal
    "lines",  # one line for each case, never cut
    "json",  # everything; the other formats can be made from it
    "markdown",  # for a GitHub issue
    "junit",  # JUnit XML, for CI systems
    "svg",  # the matrix as a picture
    "github",  # annotations for GitHub Actions
    "memory",  # with --memory, the memory held at each stage, for a terminal
]
# The other formats of `fsdp-doctor memory measure`: the ledgers as a picture, and as JSON for every rank.
AnyFormat: TypeAlias = Format | Literal["memory-svg", "memory-json"]
FORMATS: tuple[Format, ...] = get_args(Format)
_NARROWEST = 60


def render(
    report: Report,
    name: AnyFormat,
    *,
    width: int = 132,
    color: bool = False,
    unexpected: Sequence[str] = (),
    expected: Collection[str] = (),
    is_verbose: bool = False,
) -> str:
    """Renders the report in a format. The text ends in a newline.

    width: the width of the table in columns.
    color: whether the table has colours.
    unexpected: sentences about unexpected results, for annotations.
    expected: the ids of bad cases that were expected. JUnit does not count them as failures, and the table only
        summarizes them unless is_verbose.
    """
    # Imported here because importing rich would take a third of the time of `fsdp-doctor list`, which renders nothing.
    from fsdp_doctor.examination.memory_views import render_memory_svg, render_memory_table
    from fsdp_doctor.report import github, junit, markdown, table
    from fsdp_doctor.report.heat_map import render_heat_map

    match name:
        case "table":
            return table.render(report, max(width, _NARROWEST), color, expected=expected, is_verbose=is_verbose)
        case "lines":
            return make_printable(render_lines(report))
        case "json":
            return json.dumps(convert_report_to_dict(report), indent=1) + "\n"
        case "markdown":
            return make_printable(markdown.render(report)).rstrip("\n") + "\n"
        case "junit":
            return junit.render(report, expected)
        case "svg":
            return render_heat_map(report) + "\n"
        case "github":
            return github.render_workflow_commands(report, unexpected)
        case "memory":
            lines = "".join(f"{make_printable(line)}\n" for line in _list_cases_without_memory(report))
            return render_memory_table(_list_memory(report), width, color) + lines
        case "memory-svg":
            return render_memory_svg(_list_memory(report))
        case "memory-json":
            return format_memory_file(_make_memory_file(report))
        case _:
            assert_never(name)


def render_memory_picture(report: Report) -> str:
    """Renders the ledgers as SVG; empty if the report has none."""
    return render(report, "memory-svg") if _list_memory(report) else ""


def _list_memory(report: Report) -> tuple[StageMemory, ...]:
    return tuple(memory for result in report.results for memory in result.ledgers)


def _make_memory_file(report: Report) -> MemoryFile:
    accelerators = report.environment.get("accelerators") or [report.device]
    return MemoryFile(
        origin="measured",
        command=report.command,
        device=f"{report.world_size} x {accelerators[0]}",
        ledgers=_list_memory(report),
        packages=report.packages,
        notes=(*report.notes, *_list_cases_without_memory(report)),
    )


def _list_cases_without_memory(report: Report) -> Iterator[str]:
    """Yields a sentence for each case whose ledgers are missing or end early."""
    for result in report.results:
        if result.verdict.bad or not result.ledgers:
            yield f"{result.id}: {result.verdict.kind}: {result.verdict.reason}"


def render_lines(report: Report) -> str:
    """Renders one line for each case, for logs, pipes and grep."""
    fix_of = find_fixes(report)
    lines = []
    for result in report.results:
        verdict, fix = result.verdict, fix_of.get(result.id)
        parts = [result.id, verdict.kind, format_seconds(result.seconds), format_bytes(result.peak_extra_bytes)]
        if fix is not None and fix is not result:
            parts += ["fix", fix.verdict.kind, format_seconds(fix.seconds), format_bytes(fix.peak_extra_bytes)]
        if result.confirmation is not None:
            parts.append("confirmed" if result.confirmed else f"not confirmed: then {result.confirmation.kind}")
        parts += [" ".join(text.split()) for text in (verdict.reason, *verdict.also) if text]
        parts += [f"known: {result.known}"] if result.known else []
        lines.append("\t".join(parts) + "\n")
    return "".join(lines)
