"""``fsdp-doctor report expect``: a report as expectations that people can read and review."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from fsdp_doctor.cli import files

NAME = "expect"
EXIT_CODES = "Exit codes: 0 written; 2 usage; 4 the output cannot be written."


def run(
    *,
    report: Annotated[pathlib.Path, typer.Argument(help="A JSON report, also as .json.gz.")],
    output: Annotated[
        pathlib.Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead of stdout.")
    ] = None,
) -> None:
    """Write the bad verdicts of a report as a TOML file for `fsdp-doctor probe --expect`.

    It has a table for each failure: patterns of the cases, the verdict, words of its reason, a link.
    """
    from fsdp_doctor.report.expectation_toml import expectation_toml
    from fsdp_doctor.report.journal import read_report

    files.write(output, expectation_toml(read_report(report)))
