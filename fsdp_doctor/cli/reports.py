"""``fsdp-doctor report``: shows, compares, merges and makes reports of the probe."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fsdp_doctor.cli import output
from fsdp_doctor.cli.options import (
    VERBOSE,
    declare_choice,
    declare_output_file,
    declare_report_format,
    declare_words,
    flatten,
    read_expectation,
)
from fsdp_doctor.cli.probe import probe
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, FsdpDoctorError, Interrupted, UsageError
from fsdp_doctor.report.comparison import IGNORABLE

if TYPE_CHECKING:
    from fsdp_doctor.probe.baseline import Baseline
    from fsdp_doctor.report.versions.sweeping import Swept

SHOW_EXIT_CODES = "Exit codes: 0 printed, whatever the verdicts; 2 usage; 4 the output cannot be written."
DIFF_EXIT_CODES = "Exit codes: 0 no difference; 1 a difference; 2 usage; 4 the output cannot be written."
MERGE_EXIT_CODES = "Exit codes: 0 merged, whatever the verdicts; 2 usage; 4 the output cannot be written."
EXPECT_EXIT_CODES = "Exit codes: 0 written; 2 usage; 4 the output cannot be written."
SWEEP_EXIT_CODES = (
    "Exit codes: 0 every version ran, with every verdict as expected; 1 a verdict is not, or with --strict a "
    "verdict is bad; 2 usage; 3 a version does not install or cannot run here; 4 the doctor's own fault; 130 "
    "interrupted."
)
_WRITTEN_BY_SWEEP = ("json_file", "markdown", "junit", "svg")


def show(
    *,
    file: Annotated[pathlib.Path, typer.Argument(help="A JSON report, complete or partial, also as .json.gz.")],
    format: Annotated[str, declare_report_format(help="memory is for a report made with --memory.")] = "table",
    verbose: Annotated[bool, VERBOSE] = False,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="known|TOML|REPORT",
            help=(
                "The expected verdicts, as for `fsdp-doctor probe`. Used by table, github and junit.  [default: known]"
            ),
        ),
    ] = None,
    out: Annotated[
        pathlib.Path | None, declare_output_file("--output", "-o", help="Write to a file instead of stdout.")
    ] = None,
) -> None:
    """Convert a JSON report to any of the formats."""
    from fsdp_doctor.probe.baseline import Judgement
    from fsdp_doctor.report import formats
    from fsdp_doctor.report.github import write_step_summary
    from fsdp_doctor.report.journal import read_report
    from fsdp_doctor.report.layout import summarize

    report = read_report(file)
    judgement = Judgement(report, read_expectation(expect))
    if format == "github":
        write_step_summary(report, judgement.unexpected)
    on_terminal = out is None and sys.stdout.isatty()
    text = formats.render(
        report,
        cast("formats.Format", format),
        width=shutil.get_terminal_size((132, 24)).columns,
        color=on_terminal and "NO_COLOR" not in os.environ,
        unexpected=judgement.unexpected if format == "github" else (),
        expected=judgement.expected_failures,
        is_verbose=verbose,
    )
    print(summarize(report), file=sys.stderr)
    output.write(out, text)
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)


def diff(
    *,
    left: Annotated[pathlib.Path, typer.Argument(help="A JSON report, also as .json.gz.")],
    right: Annotated[pathlib.Path, typer.Argument(help="Another one.")],
    ignore: Annotated[list[str] | None, declare_choice(IGNORABLE, help="Treat all device types as the same:")] = None,
    common: Annotated[
        bool, typer.Option("--common", help="List the cases that only one report has, but do not count them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Compare two reports case by case.

    The comparison covers the verdict, the exception and its message, the ranks, the yielded tensors, and the next
    training step.
    """
    from fsdp_doctor.report import comparison
    from fsdp_doctor.report.journal import read_report

    reports = read_report(left), read_report(right)
    differences = comparison.list_differences(*reports, frozenset(ignore or ()))
    print(comparison.summarize(differences, *reports), file=sys.stderr)
    if as_json:
        print(json.dumps([dataclasses.asdict(difference) for difference in differences], indent=1))
    else:
        for difference in differences:
            print(*dataclasses.astuple(difference), sep="\t")
    counted = comparison.select_common_cases(differences) if common else differences
    raise SystemExit(EXIT_BAD_VERDICT if counted else EXIT_OK)


def merge(
    *,
    reports: Annotated[list[pathlib.Path], typer.Argument(help="JSON reports, also partial, merged or .json.gz.")],
    json_file: Annotated[
        pathlib.Path | None,
        declare_output_file(
            "--json", metavar="MERGED", help="Write the merged report, compressed by gzip if the name ends in .gz."
        ),
    ] = None,
    html: Annotated[
        pathlib.Path | None,
        declare_output_file(
            help="Write an HTML page in which cases can be looked up: one file, which needs no network."
        ),
    ] = None,
    changes: Annotated[
        bool, typer.Option("--changes", help="Print only the cases in which two versions differ.")
    ] = False,
    every_case: Annotated[
        bool, typer.Option("--cases", help="Print a line for each case, also where a file is written.")
    ] = False,
) -> None:
    """Merge reports of several versions of torch or of a framework into one, and say what changed between them.

    Prints a line for each case, with its results and the versions that showed them. If a file is written, prints
    instead a line for each environment and for each way in which cases changed.
    """
    from fsdp_doctor.report.page import write_page
    from fsdp_doctor.report.versions.merged import (
        read_either,
        render_cases,
        render_changed_cases,
        render_changes,
        render_environments,
        render_incomplete,
        summarize_merged,
        write_merged,
    )
    from fsdp_doctor.report.versions.merging import choose_names, merge

    names = choose_names(reports, json_file)
    merged = merge({name: read_either(file) for name, file in zip(names, reports, strict=True)})
    if json_file is not None:
        write_merged(json_file, merged)
    if html is not None:
        write_page(html, merged)
    if changes:
        lines = [*render_incomplete(merged), *render_changed_cases(merged)]
    elif every_case or (json_file is None and html is None):
        lines = [*render_incomplete(merged), *render_cases(merged)]
    else:
        lines = [*render_environments(merged), *render_changes(merged)]
    if lines:
        print("\n".join(lines))
    print(summarize_merged(merged), file=sys.stderr)


def expect(
    *,
    report: Annotated[pathlib.Path, typer.Argument(help="A JSON report, also as .json.gz.")],
    out: Annotated[
        pathlib.Path | None, declare_output_file("--output", "-o", help="Write to a file instead of stdout.")
    ] = None,
) -> None:
    """Write the bad verdicts of a report as a TOML file for `fsdp-doctor probe --expect`.

    The file has a table for each failure: patterns of its cases, the verdict, words of the reason, and a link.
    """
    from fsdp_doctor.report.expectation_toml import render_expectation_toml
    from fsdp_doctor.report.journal import read_report

    output.write(out, render_expectation_toml(read_report(report)))


def sweep(
    *,
    probe_options: Annotated[
        list[str] | None, typer.Argument(metavar="-- PROBE OPTIONS", help="Options of `fsdp-doctor probe`.")
    ] = None,
    torch: Annotated[
        list[str] | None,
        declare_words(help="Versions, separated by commas. 2.10 stands for the newest patch release of 2.10."),
    ] = None,
    beside: Annotated[
        list[str] | None,
        declare_words(
            "--with",
            metavar="PACKAGE==VERSION",
            help=(
                "Also install these packages, separated by commas. A package that is named twice is tried in "
                "both versions."
            ),
        ),
    ] = None,
    directory: Annotated[
        pathlib.Path, typer.Option(help="Directory for reports, logs and environments.")
    ] = pathlib.Path("sweep"),
) -> None:
    """Run the probe with several versions of torch and of other packages, each in an environment of its own.

    uv makes the environments, one after the other, and each is removed after its run (pip install
    'fsdp-doctor[sweep]'). A version with a complete report is not run again; a partial report is continued. The
    emulated device needs torch 2.10; with an older torch, the CPU is used unless torch finds an accelerator.
    """
    from fsdp_doctor.report.versions import sweeping

    planned = sweeping.Sweep(
        versions=_check_versions(torch or []),
        requirements=tuple(beside or ()),
        options=tuple(probe_options or ()),
        directory=directory,
    )
    parsed = _parse_probe(planned.options)
    if parsed["resume"] or any(parsed[name] for name in _WRITTEN_BY_SWEEP):
        raise UsageError(
            "a sweep writes the reports itself and continues them; leave out --json, --markdown, --junit, --svg and "
            "--resume, and make other formats with `fsdp-doctor report show`"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the directory {directory}: {error.strerror or error}") from None
    sweeping.check(planned)
    # So that the environment is removed and its probe ends when this process is stopped.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    swept = []
    try:
        for one in sweeping.run(planned):
            swept.append(one)
            print(_describe_result(one), flush=True)
    except _Signal as name:
        raise Interrupted(
            f"stopped by {name}; the finished cases are kept, and the same command continues with the rest"
        ) from None
    # The worst of all: a fault of ours, then a version that could not run, then a verdict.
    expected = read_expectation(parsed["expect"], strict=parsed["strict"])
    raise SystemExit(max(_exit_code(one, expected) for one in swept))


class _Signal(BaseException):
    """A signal that ends the sweep; no Exception, because importlib.metadata suppresses every Exception."""


def _stop(number: int, _: object) -> None:
    raise _Signal(signal.Signals(number).name)


def _check_versions(versions: Sequence[str]) -> tuple[str, ...]:
    from packaging.version import InvalidVersion, Version

    if not versions:
        raise UsageError("--torch names no version; give one or more, as in --torch 2.10,2.13.0")
    for version in versions:
        try:
            Version(version)
        except InvalidVersion:
            raise UsageError(f"--torch: {version!r} is not a version; give one or more, as in 2.10,2.13.0") from None
    return tuple(versions)


def _parse_probe(words: Sequence[str]) -> dict[str, Any]:
    """Returns the values of ``fsdp-doctor probe``'s options, so that wrong options end the sweep before it installs."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(flatten(probe))
    return typer.main.get_command(app).make_context("fsdp-doctor probe", list(words)).params


def _describe_result(swept: Swept) -> str:
    from fsdp_doctor.report.layout import summarize

    result = summarize(swept.report) if swept.report.results else swept.trouble
    return f"{swept.packages}\t{result}\t{swept.file}"


def _exit_code(swept: Swept, expected: Baseline) -> int:
    from fsdp_doctor.probe.baseline import Judgement

    if swept.trouble or not swept.report.complete:
        return swept.exit_code
    judgement = Judgement(swept.report, expected)
    for sentence in judgement.unexpected:
        print(f"{swept.packages}: {sentence}", file=sys.stderr)
    try:
        return judgement.choose_exit_code()
    except FsdpDoctorError as error:
        return error.exit_code
