"""The program: its commands, one module each, and how it ends. torch is imported only by what runs."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from fsdp_doctor import __version__
from fsdp_doctor.cli import (
    bench_command,
    bundle_command,
    check_command,
    diff_command,
    env_command,
    expect_command,
    explain_command,
    fingerprint_command,
    list_command,
    memory_measure,
    memory_plan,
    memory_rollout,
    merge_command,
    probe_command,
    project_defaults,
    report_command,
    repro_command,
    standard_streams,
    starting,
    sweep_command,
)
from fsdp_doctor.cli.option_groups import flattened
from fsdp_doctor.errors import CannotRun, DoctorFault, FsdpDoctorError, Interrupted, OutputClosed, UsageError
from fsdp_doctor.machine import launch

app = typer.Typer(
    name="fsdp-doctor",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
# By the panel of the help in which they are listed, the commands, and by its name each group of commands.
_COMMANDS = {
    "Diagnosis": (probe_command, explain_command, check_command, repro_command, bundle_command),
    "Memory and speed": (bench_command,),
    "More": (list_command, env_command),
}
_GROUPS = {
    "memory": (memory_measure, memory_plan, memory_rollout),
    "report": (report_command, diff_command, merge_command, expect_command, sweep_command),
    "checkpoint": (fingerprint_command,),
}
_GROUP_HELP = {
    "memory": ("Memory and speed", "Measure or predict where a job's memory goes."),
    "report": ("Reports and checkpoints", "Show, compare, merge and make reports of probes."),
    "checkpoint": ("Reports and checkpoints", "Look into checkpoints."),
}
for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        app.command(_command.NAME, epilog=_command.EXIT_CODES, rich_help_panel=_panel)(flattened(_command.run))
for _name, (_panel, _help) in _GROUP_HELP.items():
    _group = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
    for _command in _GROUPS[_name]:
        _group.command(_command.NAME, epilog=_command.EXIT_CODES)(flattened(_command.run))
    app.add_typer(_group, name=_name, help=_help, rich_help_panel=_panel)
# By their earlier names, the commands that have been renamed.
_RENAMED = {
    "plan": "memory plan",
    "rollout": "memory rollout",
    "diff": "report diff",
    "expect": "report expect",
    "merge": "report merge",
    "sweep": "report sweep",
    "fingerprint": "checkpoint fingerprint",
}


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
) -> None:
    """Find out which FSDP offload and weight-extraction combinations work here, and why the others fail."""
    if show:
        print(f"fsdp-doctor {__version__}")
        raise typer.Exit


def main() -> None:
    """The entry point: every way in which the program ends is one exit code and at most one sentence."""
    try:
        standard_streams.prepare()
        try:
            _run()
        finally:
            sys.stdout.flush()
    except FsdpDoctorError as error:
        _say_why(error)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print("fsdp-doctor: stopped by SIGINT", file=sys.stderr)
        raise SystemExit(Interrupted.exit_code) from None
    except Exception as error:
        traceback.print_exc()
        sentence = f"internal error, {type(error).__name__}: {error}; please report the traceback above"
        print(f"fsdp-doctor: {sentence}", file=sys.stderr)
        launch.tell_torchrun(sentence)
        raise SystemExit(DoctorFault.exit_code) from None


def _run() -> None:
    """Under torchrun every rank comes here; of a probe, or of memory, all but rank 0 follow what rank 0 says."""
    words = sys.argv[1:]
    asks_for_help = bool({"-h", "--help"} & set(words))
    if launch.is_rank_zero() or words[:1] == [bench_command.NAME]:
        _refuse_old_spelling(words)
        command = typer.main.get_command(app)
        command(prog_name="fsdp-doctor", default_map=project_defaults.of(command))
    elif (words[:1] == [probe_command.NAME] or words[:2] == ["memory", memory_measure.NAME]) and not asks_for_help:
        from fsdp_doctor.probe.command import follow

        starting.check_versions()
        raise SystemExit(follow())


def _refuse_old_spelling(words: Sequence[str]) -> None:
    """Raises UsageError for a command that has another name now."""
    match words:
        case [old, *_] if old in _RENAMED:
            raise UsageError(f"`fsdp-doctor {old}` is `fsdp-doctor {_RENAMED[old]}` now")
        case ["memory", *rest] if rest[:1] not in (["-h"], ["--help"]) and (not rest or rest[0].startswith("-")):
            raise UsageError("`fsdp-doctor memory` is `fsdp-doctor memory measure` now")
        case ["report", word, *_] if word not in ("-h", "--help", *(command.NAME for command in _GROUPS["report"])):
            raise UsageError("`fsdp-doctor report FILE` is `fsdp-doctor report show FILE` now")


def _say_why(error: FsdpDoctorError) -> None:
    if isinstance(error, OutputClosed):
        return
    if not launch.is_rank_zero() and isinstance(error, CannotRun | UsageError):
        # Most likely rank 0 says the same. If it does, torchrun ends this process meanwhile.
        time.sleep(2)
    # torchrun ends the other ranks when rank 0 has ended: why, rank 0 has said.
    if launch.is_rank_zero() or not isinstance(error, Interrupted):
        print(f"fsdp-doctor: {error}", file=sys.stderr)
    launch.tell_torchrun(str(error))
