"""``fsdp-doctor check``: what a training configuration amounts to."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fsdp_doctor.cli import options, output
from fsdp_doctor.cli.options import RankOptions
from fsdp_doctor.errors import CannotRun, UsageError

EXIT_CODES = (
    "Exit codes: 0 nothing in it is known to fail; 1 a known failure or a conflict; 2 usage; 3 it is not FSDP, or not "
    "all of it could be read; 4 the output cannot be written. With --probe, that of the probe."
)


def check(
    *,
    config: Annotated[
        list[str],
        typer.Argument(
            help="YAML, JSON, TOML, a shell script that starts it, - for standard input, or an override a.b=value."
        ),
    ],
    framework_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Of the framework, as 0.7.1, or main, or all.  [default: the one installed here, else all]",
        ),
    ] = None,
    torch_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION", help="Of torch, as 2.9.1, or all.  [default: the one installed here, else all]"
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks, if the configuration does not say; --probe runs on as many."),
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Then run exactly those cases.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Check a training configuration for known failures, without a GPU.

    Prints which cases of the matrix it amounts to, and what is known about them.
    """
    from fsdp_doctor import check
    from fsdp_doctor.check import presentation

    if probe and as_json:
        raise UsageError("--probe prints the probe's report, so it cannot be combined with --json")
    result = check.check(
        config, framework_version=framework_version, world_size=world_size, torch_version=torch_version
    )
    output.replace_unprintable("backslashreplace")
    sys.stdout.write(presentation.as_json(result) if as_json else presentation.as_text(result))
    if not probe:
        raise SystemExit(result.exit_code)
    sys.stdout.flush()
    selection = [word for case in check.list_cases(result) for word in ("--case", case.id)]
    if not selection:
        raise CannotRun("the configuration does not amount to any case that the probe can run")
    options.check_versions()
    options.start_ranks(RankOptions(nproc=world_size), ["probe", *selection])
