"""``fsdp-doctor merge``: several reports as one, case by environment."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_doctor.cli import files
from fsdp_doctor.errors import UsageError

if TYPE_CHECKING:
    from fsdp_doctor.versions.merged import MergedReport

NAME = "merge"
EXIT_CODES = "Exit codes: 0 merged, whatever the verdicts; 2 usage; 4 the output cannot be written."


def run(
    *,
    reports: Annotated[
        list[pathlib.Path], typer.Argument(help="JSON reports, also partial or .json.gz; or a single merged report.")
    ],
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
) -> None:
    """Merge reports of several versions of torch or of a framework into one, and say what changed between them.

    Prints a line for each case: what it showed since which version.
    """
    from fsdp_doctor.page import write_page
    from fsdp_doctor.versions.merged_file import write_merged
    from fsdp_doctor.versions.merged_text import merged_lines, merged_summary

    outputs = {name: file for name, file in {"--json": json_file, "--html": html}.items() if file is not None}
    files.check_distinct(outputs)
    for output in outputs.values():
        files.check_writable(output)
    merged = _merged(reports, json_file)
    if json_file is not None:
        write_merged(json_file, merged)
    if html is not None:
        write_page(html, merged)
    print("\n".join(merged_lines(merged, only_changes=changes)))
    print(merged_summary(merged), file=sys.stderr)


def _merged(reports: Sequence[pathlib.Path], json_file: pathlib.Path | None) -> MergedReport:
    """Of several reports, or of a single one, which may be a merged one already."""
    from fsdp_doctor.report.journal import read_report
    from fsdp_doctor.versions.merged_file import read_merged
    from fsdp_doctor.versions.merging import merge, name_beside

    if len(reports) == 1:
        with contextlib.suppress(UsageError):
            return read_merged(reports[0])
    read = {}
    for file in reports:
        name = name_beside(file, json_file)
        if name in read:
            raise UsageError(f"two of the reports would be known as {name}; rename one of them")
        read[name] = read_report(file)
    return merge(read)
