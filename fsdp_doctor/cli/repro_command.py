"""``fsdp-doctor repro``: a case as a standalone script."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from fsdp_doctor.cli import files
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.selection import Selection, select

NAME = "repro"
EXIT_CODES = "Exit codes: 0 written; 2 usage; 4 the output cannot be written."


def run(
    *,
    case: Annotated[str, typer.Argument(metavar="CASE", help="The id of a case.")],
    out: Annotated[
        pathlib.Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write to a file instead of stdout.")
    ] = None,
    report: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="REPORT", help="Expect the verdict in this JSON report, instead of the catalogue's."),
    ] = None,
) -> None:
    """Write a standalone script that reproduces a case.

    It runs under torchrun and needs torch and transformers alone (and peft, for a case with adapters); that of a
    framework's case needs the framework, and two GPUs.
    """
    from fsdp_doctor import repro
    from fsdp_doctor.report.journal import read_report

    chosen = select(Selection(case_ids=(case,)))[0]
    expectation = repro.reported(chosen, read_report(report)) if report is not None else repro.expected(chosen)
    name = out.name if out is not None else "repro.py"
    if isinstance(chosen, FrameworkCase):
        files.write(out, repro.framework_script(chosen, expectation, name))
    else:
        files.write(out, repro.script(chosen, expectation, name))
