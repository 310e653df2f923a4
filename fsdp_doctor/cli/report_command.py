"""``fsdp-doctor report show``: a JSON report in another format."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
from typing import Annotated

import typer

from fsdp_doctor.cli import files, values

NAME = "show"
EXIT_CODES = "Exit codes: 0 printed, whatever the verdicts; 2 usage; 4 the output cannot be written."


def run(
    *,
    file: Annotated[pathlib.Path, typer.Argument(help="A JSON report, complete or partial, also as .json.gz.")],
    format: Annotated[
        str,
        typer.Option(
            help="table, lines, json, markdown, junit, svg or github; of a report made with --memory also memory, "
            "memory-svg or ledgers."
        ),
    ] = "table",
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="known|TOML|REPORT",
            help="For github and junit: the expected verdicts, as for `fsdp-doctor probe --expect`.  "
            "[default: for github, known]",
        ),
    ] = None,
    output: Annotated[
        pathlib.Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead of stdout.")
    ] = None,
) -> None:
    """Convert a JSON report to any of the formats."""
    from fsdp_doctor.probe import baseline
    from fsdp_doctor.report import formats
    from fsdp_doctor.report.document import context_of
    from fsdp_doctor.report.github import write_step_summary
    from fsdp_doctor.report.journal import read_report
    from fsdp_doctor.report.layout import summary

    name = values.output_format(format)
    found = read_report(file)
    context = context_of(found)
    expected = values.baseline(expect) if expect is not None else None
    surprises = baseline.surprises(found, expected or "known", context) if name == "github" else []
    if name == "github":
        write_step_summary(found, surprises)
    on_terminal = output is None and sys.stdout.isatty()
    text = formats.render(
        found,
        "table" if name == "auto" else name,
        width=shutil.get_terminal_size((132, 24)).columns,
        color=on_terminal and "NO_COLOR" not in os.environ,
        surprises=surprises,
        expected=baseline.as_expected(found, expected, context),
    )
    files.write(output, text)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    print(summary(found), file=sys.stderr)
