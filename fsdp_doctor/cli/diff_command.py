"""``fsdp-doctor report diff``: two reports, case by case."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Annotated

import typer

from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, UsageError

NAME = "diff"
EXIT_CODES = "Exit codes: 0 no difference; 1 a difference; 2 usage; 4 the output cannot be written."


def run(
    *,
    left: Annotated[pathlib.Path, typer.Argument(help="A JSON report, also as .json.gz.")],
    right: Annotated[pathlib.Path, typer.Argument(help="Another one.")],
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="WHAT", help="device: treat all device types as the same.")
    ] = None,
    common: Annotated[
        bool, typer.Option("--common", help="List the cases that only one report has, but do not count them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Compare two reports case by case.

    Compared are the verdict, the exception and its message, the ranks, what was yielded, and the next training step.
    """
    from fsdp_doctor.report import comparison
    from fsdp_doctor.report.journal import read_report

    ignored = frozenset(ignore or ())
    for name in ignored - set(comparison.IGNORABLE):
        raise UsageError(f"--ignore: unknown value {name!r}; use {', '.join(comparison.IGNORABLE)}")
    reports = read_report(left), read_report(right)
    found = comparison.differences(*reports, ignored)
    if as_json:
        print(json.dumps([dataclasses.asdict(difference) for difference in found], indent=1))
    else:
        for difference in found:
            print(*dataclasses.astuple(difference), sep="\t")
    print(comparison.sentence(found, *reports), file=sys.stderr)
    counted = comparison.on_common_cases(found) if common else found
    raise SystemExit(EXIT_BAD_VERDICT if counted else EXIT_OK)
