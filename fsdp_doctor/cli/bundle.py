"""``fsdp-doctor bundle``, which writes a bug report into one file, and ``fsdp-doctor env``, which describes the
machine.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import tempfile
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_doctor.cli.options import declare_output_file
from fsdp_doctor.cli.output import check_writable
from fsdp_doctor.errors import UsageError

if TYPE_CHECKING:
    from fsdp_doctor.bundle import Bundle

BUNDLE_EXIT_CODES = (
    "Exit codes: 0 written, however the command ended; 2 usage, or the command cannot be started; "
    "4 the bundle cannot be written."
)

ENV_EXIT_CODES = "Exit codes: 0 printed; 2 usage; 4 the output cannot be written."


def bundle(
    *,
    log: Annotated[
        list[pathlib.Path] | None,
        typer.Option(metavar="FILE", help="A log, - for standard input, or a flight recorder's dump. Can be repeated."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A training configuration, or an override a.b=value. Can be repeated."),
    ] = None,
    report: Annotated[pathlib.Path | None, typer.Option(metavar="FILE", help="A JSON report.")] = None,
    hang_after: Annotated[
        float,
        typer.Option(min=0.001, metavar="SECONDS", help="How long the command may be silent before it counts as hung."),
    ] = 600.0,
    output: Annotated[pathlib.Path, declare_output_file("--output", "-o", help="The zip file to write.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="A command to run, after --.", show_default=False),
    ] = None,
) -> None:
    """Collect what a bug report needs into one file, without anything private.

    With a COMMAND, the command is run first. Its output and exit codes are kept, and every rank's stack if it hangs.
    """
    from fsdp_doctor import bundle
    from fsdp_doctor.check import check
    from fsdp_doctor.machine.environment import collect
    from fsdp_doctor.report.journal import read_report

    if not (log or config or report or command):
        raise UsageError("nothing to report; give --log, --config, --report, or a command after --")
    # If the disk is full in the end, what the command wrote is still there.
    record = output.with_name(output.name + ".log")
    if command:
        check_writable(record)
    with tempfile.TemporaryDirectory(prefix="fsdp-doctor-") as directory:
        logs = [bundle.make_readable_file(path, pathlib.Path(directory)) for path in log or ()]
        # A log that cannot be read is refused before the command runs for hours.
        bundle.gather({}, logs=logs)
        configuration = check(config) if config else None
        earlier = read_report(report) if report is not None else None
        dumps = pathlib.Path(directory) / "dumps"
        ran = bundle.run(command, output=record, dumps=dumps, hang_after=hang_after) if command else None
        environment = earlier.environment if earlier is not None and ran is None else collect()
        evidence = bundle.gather(environment, logs=logs, configuration=configuration, report=earlier, run=ran)
        made = bundle.make_bundle(evidence)
    bundle.write_bundle(output, made)
    if ran is not None:
        with contextlib.suppress(OSError):
            record.unlink()
        print(f"fsdp-doctor: {ran.sentence}", file=sys.stderr)
    _print_contents(output, made)


def _print_contents(output: pathlib.Path, made: Bundle) -> None:
    print(f"{output}: {', '.join(made.files)}")
    counts = ", ".join(f"{kind} ({count})" for kind, count in made.replaced.most_common())
    print(f"replaced: {counts or 'nothing'}")
    print("Read issue.md before you publish it: private text in an unknown form is still in the bundle.")


def env(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    host_name: Annotated[bool, typer.Option("--host-name", help="Include this machine's host name.")] = False,
) -> None:
    """Print the environment section of a report.

    This also works where torch cannot be imported.
    """
    from fsdp_doctor.machine.environment import collect, format_lines

    facts = collect(host_name)
    print(json.dumps(facts, indent=1) if as_json else "\n".join(format_lines(facts)))
