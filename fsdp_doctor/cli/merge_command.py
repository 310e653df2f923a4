"""``fsdp-doctor report merge``: several reports as one, case by environment."""

from __future__ import annotations

import pathlib
import sys
from typing import Annotated

import typer

from fsdp_doctor.cli import files

NAME = "merge"
EXIT_CODES = "Exit codes: 0 merged, whatever the verdicts; 2 usage; 4 the output cannot be written."


def run(
    *,
    reports: Annotated[list[pathlib.Path], typer.Argument(help="JSON reports, also partial, merged or .json.gz.")],
    json_file: Annotated[
        pathlib.Path | None,
        typer.Option("--json", metavar="MERGED", help="Write the merged report; gzip's if the name ends in .gz."),
    ] = None,
    html: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Write a page to look cases up in: one file, which needs no network."),
    ] = None,
    changes: Annotated[
        bool, typer.Option("--changes", help="Print only the cases that two versions do not agree on.")
    ] = False,
    every_case: Annotated[
        bool, typer.Option("--cases", help="Print a line for each case, also where a file is written.")
    ] = False,
) -> None:
    """Merge reports of several versions of torch or of a framework into one, and say what changed between them.

    Prints a line for each case: what it showed since which version. Where a file is written, it prints a line for each
    environment, and for each case that changed.
    """
    from fsdp_doctor.page import write_page
    from fsdp_doctor.versions.merged import read_either, write_merged
    from fsdp_doctor.versions.merged_text import case_lines, environment_lines, incomplete_lines, merged_summary
    from fsdp_doctor.versions.merging import merge, names_beside

    outputs = {name: file for name, file in {"--json": json_file, "--html": html}.items() if file is not None}
    files.check_distinct(outputs)
    for output in outputs.values():
        files.check_writable(output)
    names = names_beside(reports, json_file)
    merged = merge({name: read_either(file) for name, file in zip(names, reports, strict=True)})
    if json_file is not None:
        write_merged(json_file, merged)
    if html is not None:
        write_page(html, merged)
    brief = bool(outputs) and not every_case
    lines = [
        *(environment_lines(merged) if brief and not changes else incomplete_lines(merged)),
        *case_lines(merged, only_changes=changes or brief),
    ]
    if lines:
        print("\n".join(lines))
    print(merged_summary(merged), file=sys.stderr)
