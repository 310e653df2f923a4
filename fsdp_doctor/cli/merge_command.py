"""``fsdp-doctor merge``: several reports as one, case by environment."""

from __future__ import annotations

import pathlib
import sys
from typing import Annotated

import typer

from fsdp_doctor.cli import files
from fsdp_doctor.errors import UsageError

NAME = "merge"
EXIT_CODES = "Exit codes: 0 merged, whatever the verdicts; 2 usage; 4 the output cannot be written."


def run(
    *,
    reports: Annotated[list[pathlib.Path], typer.Argument(help="JSON reports, also partial ones and .json.gz.")],
    json_file: Annotated[
        pathlib.Path | None,
        typer.Option("--json", metavar="MERGED", help="Write the merged report; gzip's if the name ends in .gz."),
    ] = None,
    changes: Annotated[
        bool, typer.Option("--changes", help="Print only the cases that two versions do not agree on.")
    ] = False,
) -> None:
    """Merge reports of several versions of torch or of a framework into one, and say what changed between them.

    Prints a line for each case: what it showed since which version.
    """
    from fsdp_doctor.report.journal import read_report
    from fsdp_doctor.versions.merged_file import write_merged
    from fsdp_doctor.versions.merged_text import merged_lines, merged_summary
    from fsdp_doctor.versions.merging import merge, name_beside

    for output in filter(None, [json_file]):
        files.check_writable(output)
    read = {}
    for file in reports:
        name = name_beside(file, json_file)
        if name in read:
            raise UsageError(f"two of the reports would be known as {name}; rename one of them")
        read[name] = read_report(file)
    merged = merge(read)
    if json_file is not None:
        write_merged(json_file, merged)
    print("\n".join(merged_lines(merged, only_changes=changes)))
    print(merged_summary(merged), file=sys.stderr)
