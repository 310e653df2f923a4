"""``fsdp-doctor report sweep``: the probe with several versions of torch."""

from __future__ import annotations

import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_doctor.cli import probe_command, values
from fsdp_doctor.cli.option_groups import flattened
from fsdp_doctor.errors import FsdpDoctorError, Interrupted, UsageError

if TYPE_CHECKING:
    from fsdp_doctor.probe.baseline import Baseline
    from fsdp_doctor.versions.sweeping import Swept

NAME = "sweep"
EXIT_CODES = (
    "Exit codes: 0 every version ran and has nothing bad, or all as --expect says; 1 a bad verdict, or one that "
    "--expect does not have; 2 usage; 3 a version does not install or cannot run here; 4 the doctor's own fault; "
    "130 interrupted."
)

_WRITTEN_HERE = ("json_file", "markdown", "junit", "svg")


def run(
    *,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="-- PROBE OPTIONS", help="Options of `fsdp-doctor probe`.")
    ] = None,
    torch: Annotated[
        list[str] | None,
        typer.Option(help="Versions, separated by commas. 2.10 is its newest patch release."),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="PACKAGE==VERSION", help="Install this, too; several are separated by commas."),
    ] = None,
    directory: Annotated[
        pathlib.Path, typer.Option(help="Where the reports and logs are kept, and environments are made.")
    ] = pathlib.Path("sweep"),
) -> None:
    """Run the probe with several versions of torch, each in an environment of its own.

    Environments are made by uv, or else by venv and pip, one after the other, and removed after their run. A version
    whose report is complete is not run again, a partial report is continued. Before torch 2.10, where there is no
    emulated device, the CPU is used unless torch sees an accelerator.
    """
    from fsdp_doctor.versions import sweeping

    sweep = sweeping.Sweep(
        versions=_versions(torch),
        requirements=tuple(values.split(beside)),
        options=tuple(options or ()),
        directory=directory,
    )
    _check_options(sweep.options)
    _make(directory)
    sweeping.check(sweep)
    # So that the environment is removed and its probe ends when this process is stopped.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    swept = []
    try:
        for version in sweeping.run(sweep):
            swept.append(version)
            print(_result_line(version), flush=True)
    except _Signal as signal_:
        raise Interrupted(f"stopped by {signal_}; what ran is kept, and the same command goes on with it") from None
    raise SystemExit(_exit_code(swept, sweep.options))


class _Signal(BaseException):
    """A BaseException, because importlib.metadata suppresses every Exception while it looks into a directory."""


def _stop(number: int, _: object) -> None:
    raise _Signal(signal.Signals(number).name)


def _versions(given: list[str] | None) -> tuple[str, ...]:
    from packaging.version import InvalidVersion, Version

    versions = tuple(dict.fromkeys(values.split(given)))
    if not versions:
        raise UsageError("--torch names no version; give one or more, as in --torch 2.10,2.13.0")
    for version in versions:
        try:
            Version(version)
        except InvalidVersion:
            raise UsageError(f"--torch: {version!r} is not a version; give one or more, as in 2.10,2.13.0") from None
    return versions


def _make(directory: pathlib.Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the directory {directory}: {error.strerror or error}") from None


def _check_options(options: Sequence[str]) -> None:
    """Raises UsageError for what `probe` does not take, before anything is installed for it."""
    given = _parsed(options)
    if given["resume"] or any(given[name] for name in _WRITTEN_HERE):
        raise UsageError(
            "a sweep writes the reports itself and continues them; leave out --json, --markdown, --junit, --svg and "
            "--resume, and make other formats with `fsdp-doctor report show`"
        )


def _parsed(options: Sequence[str]) -> dict[str, Any]:
    probe = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    probe.command()(flattened(probe_command.run))
    # Typer itself says what is wrong with an option, as it does for `fsdp-doctor probe`.
    return typer.main.get_command(probe).make_context("fsdp-doctor probe", list(options)).params


def _result_line(swept: Swept) -> str:
    from fsdp_doctor.report.layout import summary

    result = summary(swept.report) if swept.report.results else swept.trouble
    return f"torch {swept.version}\t{result}\t{swept.file}"


def _exit_code(swept: Sequence[Swept], options: Sequence[str]) -> int:
    """The worst exit code of all versions: a fault of ours, then a version that could not run, then a verdict."""
    expect = _parsed(options)["expect"]
    expected = values.baseline(expect) if expect is not None else None
    return max(_exit_code_of(version, expected) for version in swept)


def _exit_code_of(swept: Swept, expected: Baseline) -> int:
    from fsdp_doctor.probe import baseline
    from fsdp_doctor.report.document import context_of

    if swept.trouble or not swept.report.complete:
        return swept.exit_code
    surprises = baseline.surprises(swept.report, expected, context_of(swept.report))
    for sentence in surprises:
        print(f"torch {swept.version}: {sentence}", file=sys.stderr)
    try:
        return baseline.exit_code(swept.report, expected, surprises)
    except FsdpDoctorError as error:
        return error.exit_code
