"""``fsdp-doctor check``: finds known failures in a training configuration."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_doctor.cli import options, output
from fsdp_doctor.cli.options import RankOptions
from fsdp_doctor.errors import EXIT_BAD_VERDICT, EXIT_OK, CannotRun, UsageError
from fsdp_doctor.machine.terminal import measure_width

if TYPE_CHECKING:
    from fsdp_doctor.check.fix import Fix

EXIT_CODES = (
    "Exit codes: 0 nothing in the configuration is known to fail; 1 a known failure or a conflict; 2 usage; "
    "3 the job is not FSDP, or some settings could not be read; 4 the output cannot be written. With "
    "--probe: the exit code of the probe."
)


def check(
    *,
    config: Annotated[
        list[str],
        typer.Argument(
            help=(
                "YAML, JSON, TOML, a shell script that starts the training, - for standard input, or an override "
                "a.b=value."
            )
        ),
    ],
    framework_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help=(
                "Version of the framework: for example 0.7.1, main, or all.  [default: the installed version, else all]"
            ),
        ),
    ] = None,
    torch_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Version of torch: for example 2.9.1, or all.  [default: the installed version, else all]",
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks, if the configuration does not say. --probe uses this number."),
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Then run exactly the cases that were found.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Print the file, with the one setting changed that removes a failure.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="With --fix: write the changed file instead of printing it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Check a training configuration for known failures, without a GPU.

    Prints the cases of the matrix to which the configuration corresponds, and what is known about them.
    """
    from fsdp_doctor import check
    from fsdp_doctor.check import presentation
    from fsdp_doctor.check.fix import find_fix

    if probe and as_json:
        raise UsageError("--probe prints the probe's report, so it cannot be combined with --json")
    if write and not fix:
        raise UsageError("--write writes the change that --fix finds; use it with --fix")
    run = functools.partial(
        check.check, framework_version=framework_version, world_size=world_size, torch_version=torch_version
    )
    result = run(config)
    if fix and any(finding.bad for finding in result.findings):
        _print_fix(find_fix(config, run), presentation.list_remedies(result), write=write)
    output.replace_unprintable("backslashreplace")
    text = presentation.render_json(result) if as_json else presentation.render_text(result, measure_width())
    sys.stdout.write(text)
    if not probe:
        raise SystemExit(result.exit_code)
    sys.stdout.flush()
    selection = [word for case in check.list_cases(result) for word in ("--case", case.id)]
    if not selection:
        raise CannotRun("the configuration does not correspond to any case that the probe can run")
    options.check_versions()
    options.start_ranks(RankOptions(nproc=world_size), ["probe", *selection])


def _print_fix(fix: Fix | None, remedies: Mapping[str, str], *, write: bool) -> None:
    """Prints or writes the changed file, and ends the command. Raises CannotRun if there is no fix.

    remedies: maps codes of known failures to their remedies. The changed setting may be only a part of a remedy.
    """
    if fix is None:
        raise CannotRun(
            "no change of a single setting in a file solves the problem, and no remedy is such a change; see the "
            "findings without --fix"
        )
    print(f"fsdp-doctor: {fix}", file=sys.stderr)
    for entry, remedy in remedies.items():
        print(f"fsdp-doctor: only this setting was changed; the whole remedy of {entry}: {remedy}", file=sys.stderr)
    for finding in fix.left:
        name = f"{finding.entry}: " if finding.entry else ""
        print(f"fsdp-doctor: the changed file still has {name}{finding.sentence}", file=sys.stderr)
    if write:
        fix.file.write_text(fix.text, encoding="utf-8")
    else:
        sys.stdout.write(fix.text)
    raise SystemExit(EXIT_BAD_VERDICT if fix.left else EXIT_OK)
