"""The program: its commands, and how it ends. torch is imported only by what runs."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import Annotated, TypeAlias

import typer

from fsdp_doctor import __version__
from fsdp_doctor.cli import (
    bundle,
    check,
    checkpoint,
    explain,
    memory,
    output,
    probe,
    project_defaults,
    reports,
    resume,
    selection,
)
from fsdp_doctor.cli.options import check_versions, flatten
from fsdp_doctor.errors import CannotRun, DoctorFault, FsdpDoctorError, Interrupted, OutputClosed, UsageError
from fsdp_doctor.machine import launch

app = typer.Typer(
    name="fsdp-doctor",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
_Command: TypeAlias = tuple[Callable[..., None], str]
# By the panel of the help, and by the group: each command with its function, and the sentence on its exit codes.
_COMMANDS: dict[str, dict[str, _Command]] = {
    "Diagnosis": {
        "probe": (probe.probe, probe.PROBE_EXIT_CODES),
        "explain": (explain.explain, explain.EXIT_CODES),
        "check": (check.check, check.EXIT_CODES),
        "resume": (resume.resume, resume.EXIT_CODES),
        "repro": (probe.repro, probe.REPRO_EXIT_CODES),
        "bundle": (bundle.bundle, bundle.BUNDLE_EXIT_CODES),
    },
    "Facts": {
        "list": (selection.list_cases, selection.LIST_EXIT_CODES),
        "env": (bundle.env, bundle.ENV_EXIT_CODES),
    },
}
_GROUPS: dict[str, dict[str, _Command]] = {
    "memory": {
        "measure": (memory.measure, memory.MEASURE_EXIT_CODES),
        "plan": (memory.plan, memory.PLAN_EXIT_CODES),
    },
    "report": {
        "show": (reports.show, reports.SHOW_EXIT_CODES),
        "diff": (reports.diff, reports.DIFF_EXIT_CODES),
        "merge": (reports.merge, reports.MERGE_EXIT_CODES),
        "expect": (reports.expect, reports.EXPECT_EXIT_CODES),
        "sweep": (reports.sweep, reports.SWEEP_EXIT_CODES),
    },
    "checkpoint": {
        "verify": (checkpoint.verify, checkpoint.VERIFY_EXIT_CODES),
        "diff": (checkpoint.diff, checkpoint.DIFF_EXIT_CODES),
        "convert": (checkpoint.convert, checkpoint.CONVERT_EXIT_CODES),
        "fingerprint": (checkpoint.fingerprint, checkpoint.FINGERPRINT_EXIT_CODES),
    },
}
_GROUP_HELP = {
    "memory": "Measure or predict where a job's memory goes.",
    "report": "Show, compare, merge and make reports of the probe.",
    "checkpoint": "Look into checkpoints.",
}
for _panel, _commands in _COMMANDS.items():
    for _name, (_function, _exit_codes) in _commands.items():
        app.command(_name, epilog=_exit_codes, rich_help_panel=_panel)(flatten(_function))
for _group, _commands in _GROUPS.items():
    _typer = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
    for _name, (_function, _exit_codes) in _commands.items():
        _typer.command(_name, epilog=_exit_codes)(flatten(_function))
    app.add_typer(_typer, name=_group, help=_GROUP_HELP[_group], rich_help_panel="Memory, reports, checkpoints")
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
    """The package that could not import something; empty if that was this program."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    package: str = frames[-1].f_globals.get("__name__", "").partition(".")[0]
    return "" if package == __package__.partition(".")[0] else package


def main() -> None:
    """The entry point: every way in which the program ends is one exit code and at most one sentence."""
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
    """Runs the command. Under torchrun every rank comes here; in a probe, all but rank 0 follow rank 0."""
    words = sys.argv[1:]
    asks_for_help = bool({"-h", "--help"} & set(words))
    if launch.is_rank_zero():
        command = typer.main.get_command(app)
        defaults = project_defaults.read_defaults(command)
        try:
            raise SystemExit(command(prog_name="fsdp-doctor", default_map=defaults, standalone_mode=False))
        except _WrongUsage as error:
            # A command without arguments has printed its help, and has nothing to say.
            raise UsageError(error.format_message()) from None  # type: ignore[attr-defined]
    elif (words[:1] == ["probe"] or words[:2] == ["memory", "measure"]) and not asks_for_help:
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
