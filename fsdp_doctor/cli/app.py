"""Runs the commands, and turns every end of a command into an exit code. Only commands that need torch import torch."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Annotated

import typer
import typer.main

from fsdp_doctor import __version__
from fsdp_doctor.cli import output, project_defaults
from fsdp_doctor.cli.commands import MARKUP, LazyGroup
from fsdp_doctor.errors import CannotRun, DoctorFault, FsdpDoctorError, Interrupted, OutputClosed, UsageError
from fsdp_doctor.machine import launch

app = typer.Typer(
    name="fsdp-doctor",
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode=MARKUP,
    pretty_exceptions_enable=False,
)
# click's UsageError, of the click that typer uses: newer versions of typer contain one.
_WrongUsage: type[Exception] = typer.BadParameter.__mro__[1]


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
) -> None:
    """Find out which FSDP offload and weight-extraction combinations work here, and why the others fail."""
    if show:
        print(f"fsdp-doctor {__version__}")
        raise typer.Exit


def _find_importing_package(error: ImportError) -> str:
    """Returns the package whose import of another module failed; empty if it is this package."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    package: str = frames[-1].f_globals.get("__name__", "").partition(".")[0]
    return "" if package == __package__.partition(".")[0] else package


def main() -> None:
    """Runs the program. An error has an exit code and at most one sentence; an internal error also has a traceback."""
    try:
        output.prepare_streams()
        try:
            _run()
        finally:
            sys.stdout.flush()
    except FsdpDoctorError as error:
        _print_error(error)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print("fsdp-doctor: stopped by SIGINT", file=sys.stderr)
        raise SystemExit(Interrupted.exit_code) from None
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, ImportError) and (package := _find_importing_package(error)):
            _print_error(CannotRun(f"the installed {package} cannot be imported: {error}"))
            raise SystemExit(CannotRun.exit_code) from None
        sentence = f"internal error, {type(error).__name__}: {error}; please report the traceback above"
        print(f"fsdp-doctor: {sentence}", file=sys.stderr)
        launch.tell_torchrun(sentence)
        raise SystemExit(DoctorFault.exit_code) from None


def _run() -> None:
    """Runs the command. Under torchrun, every rank calls this function, and rank 0 leads the others in a probe."""
    words = sys.argv[1:]
    asks_for_help = bool({"-h", "--help"} & set(words))
    if launch.is_rank_zero():
        command = typer.main.get_command(app)
        defaults = project_defaults.read_defaults(command)
        try:
            raise SystemExit(command(prog_name="fsdp-doctor", default_map=defaults, standalone_mode=False))
        except _WrongUsage as error:
            # A command without arguments has printed its help, and has nothing to say.
            # click lists the values of a missing option in lines of their own.
            raise UsageError(" ".join(error.format_message().split())) from None  # type: ignore[attr-defined]
    elif (words[:1] == ["probe"] or words[:2] == ["memory", "measure"]) and not asks_for_help:
        from fsdp_doctor.cli.options import check_versions
        from fsdp_doctor.probe.command import follow

        check_versions()
        raise SystemExit(follow())


def _print_error(error: FsdpDoctorError) -> None:
    if isinstance(error, OutputClosed) or not str(error):
        return
    if not launch.is_rank_zero() and isinstance(error, CannotRun | UsageError):
        # Most likely rank 0 prints the same. If it does, this process is ended meanwhile.
        time.sleep(2)
    # The other ranks are ended when rank 0 has ended, and rank 0 has printed why.
    if launch.is_rank_zero() or not isinstance(error, Interrupted):
        print(f"fsdp-doctor: {error}", file=sys.stderr)
    launch.tell_torchrun(str(error))
