"""The formats by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Literal, TypeAlias

from typing_extensions import assert_never

from fsdp_doctor.report.document import Report, report_to_dict
from fsdp_doctor.report.layout import printable

Format: TypeAlias = Literal[
    "table", "lines", "json", "markdown", "junit", "svg", "github", "memory", "memory-svg", "ledgers"
]

FORMATS: dict[Format, str] = {
    "table": "the matrix, for a terminal",
    "lines": "one line for each case, never cut",
    "json": "everything; the other formats can be made from it",
    "markdown": "for a GitHub issue",
    "junit": "JUnit XML, for CI systems",
    "svg": "the matrix as a picture",
    "github": "annotations for GitHub Actions",
    "memory": "with --memory, what is held at each stage, for a terminal",
    "memory-svg": "the same as a picture",
    "ledgers": "the same as JSON, of every rank",
}
_NARROWEST = 60


def render(
    report: Report,
    name: Format,
    *,
    width: int = 132,
    color: bool = False,
    surprises: Sequence[str] = (),
    expected: Collection[str] = (),
) -> str:
    """The report in one of FORMATS, ending in a newline.

    width, color: of the table, in columns. surprises: what is not as expected, for annotations.
    expected: the ids of bad cases that are, which for JUnit are no failures.
    """
    # Imported here: rich costs `fsdp-doctor list` a third of its time, and `list` renders nothing.
    from fsdp_doctor.ledgers.ledger import ledgers_to_json
    from fsdp_doctor.ledgers.ledger_views import ledgers_svg
    from fsdp_doctor.report import case_lines, github, junit, markdown, measured_ledgers, table

    match name:
        case "table":
            return table.render(report, max(width, _NARROWEST), color)
        case "lines":
            return printable(case_lines.render(report))
        case "json":
            return json.dumps(report_to_dict(report), indent=1) + "\n"
        case "markdown":
            return printable(markdown.render(report)).rstrip("\n") + "\n"
        case "junit":
            return junit.render(report, expected)
        case "svg":
            return printable(table.render_svg(report)) + "\n"
        case "github":
            return github.workflow_commands(report, surprises)
        case "memory":
            return measured_ledgers.ledger_text(report, color)
        case "memory-svg":
            return ledgers_svg(measured_ledgers.ledgers_of(report))
        case "ledgers":
            return ledgers_to_json(measured_ledgers.ledger_file(report))
        case _:
            assert_never(name)
