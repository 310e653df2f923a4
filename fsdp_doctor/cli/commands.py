"""The table of the program's commands. The module of a command is imported when the command is called."""

from __future__ import annotations

import enum
import functools
import importlib
import pathlib
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import typer
import typer.core
import typer.main

MARKUP: Literal["markdown"] = "markdown"
# What the help prints for the value of an option; a flag has none, and an argument has its name.
_VALUE_WORDS = {int: "N", float: "N", str: "TEXT", pathlib.Path: "PATH"}


class _PlainCommand(typer.core.TyperCommand):
    """A command whose help describes the values of options in words."""

    def get_params(self, ctx: Any) -> Any:
        return _name_values(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "").upper() for piece in super().collect_usage_pieces(ctx)]


def _name_values(params: Any) -> Any:
    """Makes the help print words for the types of values; typer 0.27 and later would print names of Python types."""
    for param in params:
        is_argument = isinstance(param, typer.core.TyperArgument)
        if hasattr(param, "type_descriptor") and (is_argument or param.metavar is None):
            word = "" if is_argument else _name_value(param.type_descriptor.annotation)
            vars(param)["display_type_rich"] = functools.partial(_return_word, word or None)
    return params


def _name_value(kind: Any) -> str:
    """Returns the word that the help prints for a value of this type, or the choices of the type."""
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(str(each.value) for each in kind)
    (kind,) = get_args(kind)[:1] or (kind,)
    return _VALUE_WORDS.get(kind, "")


def _return_word(word: str | None, ctx: Any) -> str | None:
    return word


@dataclass(frozen=True)
class _Command:
    """A command before its module is imported.

    module: the name of the command's module in ``fsdp_doctor.cli``.
    function: the name of the command's function, whose docstring begins with ``summary``.
    exit_codes: the name of the module's variable that explains the exit codes.
    summary: the first sentence of the command's help.
    """

    module: str
    function: str
    exit_codes: str
    summary: str

    def make(self, name: str, panel: str | None) -> Any:
        """Imports the module, and returns the command as an object of click."""
        from fsdp_doctor.cli.options import flatten

        module = importlib.import_module(f"fsdp_doctor.cli.{self.module}")
        alone = typer.Typer(rich_markup_mode=MARKUP)
        epilog = getattr(module, self.exit_codes)
        declare = alone.command(name, cls=_PlainCommand, epilog=epilog, rich_help_panel=panel)
        declare(flatten(getattr(module, self.function)))
        return typer.main.get_command_from_info(
            alone.registered_commands[0], pretty_exceptions_short=True, rich_markup_mode=MARKUP
        )


@dataclass(frozen=True)
class _Group:
    summary: str

    def make(self, name: str, panel: str | None) -> Any:
        """Returns the group as an object of click, without importing the modules of its commands."""
        group = typer.Typer(name=name, cls=LazyGroup, no_args_is_help=True, rich_markup_mode=MARKUP, help=self.summary)
        group.callback()(lambda: None)
        made: Any = typer.main.get_command(group)
        made.rich_help_panel = panel
        return made


_OTHERS = "Memory, reports, checkpoints"
# By the group, the root's first: each command, and the panel of the help that lists it.
_TABLE: dict[str, dict[str, tuple[_Command | _Group, str | None]]] = {
    "fsdp-doctor": {
        "probe": (
            _Command("probe", "probe", "PROBE_EXIT_CODES", "Run the matrix and report what works here."),
            "Diagnosis",
        ),
        "explain": (
            _Command("explain", "explain", "EXIT_CODES", "Find the root cause in the log of a job, and its remedy."),
            "Diagnosis",
        ),
        "check": (
            _Command(
                "check",
                "check",
                "EXIT_CODES",
                "Check a training configuration for known failures, without a GPU.",
            ),
            "Diagnosis",
        ),
        "resume": (
            _Command(
                "resume",
                "resume",
                "EXIT_CODES",
                "Run a training job straight through and resumed, and say whether that is the same run.",
            ),
            "Diagnosis",
        ),
        "fix": (
            _Command(
                "fix",
                "fix",
                "EXIT_CODES",
                "Run a job with its framework's broken functions replaced, and say on which ranks they were called.",
            ),
            "Diagnosis",
        ),
        "repro": (
            _Command("probe", "repro", "REPRO_EXIT_CODES", "Write a standalone script that reproduces a case."),
            "Diagnosis",
        ),
        "bundle": (
            _Command(
                "bundle",
                "bundle",
                "BUNDLE_EXIT_CODES",
                "Collect what a bug report needs into one file, without anything private.",
            ),
            "Diagnosis",
        ),
        "list": (
            _Command(
                "selection",
                "list_cases",
                "LIST_EXIT_CODES",
                "Print the selected cases, or the methods or axes; runs nothing.",
            ),
            "Facts",
        ),
        "env": (_Command("bundle", "env", "ENV_EXIT_CODES", "Print the environment section of a report."), "Facts"),
        "memory": (_Group("Measure or predict where a job's memory goes."), _OTHERS),
        "report": (_Group("Show, compare, merge and make reports of the probe."), _OTHERS),
        "checkpoint": (_Group("Look into checkpoints."), _OTHERS),
    },
    "memory": {
        "measure": (
            _Command(
                "memory",
                "measure",
                "MEASURE_EXIT_CODES",
                "Measure the memory of each rank at each stage of a job, by class.",
            ),
            None,
        ),
        "plan": (
            _Command(
                "memory",
                "plan",
                "PLAN_EXIT_CODES",
                "Predict the memory of a training job on each device and host, without a GPU and without weights.",
            ),
            None,
        ),
    },
    "report": {
        "show": (
            _Command("reports", "show", "SHOW_EXIT_CODES", "Convert a JSON report to any of the formats."),
            None,
        ),
        "diff": (_Command("reports", "diff", "DIFF_EXIT_CODES", "Compare two reports case by case."), None),
        "merge": (
            _Command(
                "reports",
                "merge",
                "MERGE_EXIT_CODES",
                "Merge reports of several versions of torch or of a framework into one, and say what changed between "
                "them.",
            ),
            None,
        ),
        "expect": (
            _Command(
                "reports",
                "expect",
                "EXPECT_EXIT_CODES",
                "Write the bad verdicts of a report as a TOML file for `fsdp-doctor probe --expect`.",
            ),
            None,
        ),
        "sweep": (
            _Command(
                "reports",
                "sweep",
                "SWEEP_EXIT_CODES",
                "Run the probe with several versions of torch and of other packages, each in an environment of its "
                "own.",
            ),
            None,
        ),
    },
    "checkpoint": {
        "verify": (
            _Command(
                "checkpoint",
                "verify",
                "VERIFY_EXIT_CODES",
                "Find what is damaged in a checkpoint on disk, without torch, without the model, and without running "
                "a pickle.",
            ),
            None,
        ),
        "diff": (
            _Command(
                "checkpoint",
                "diff",
                "DIFF_EXIT_CODES",
                "Compare the models in two checkpoints, whatever their formats and sharding: which tensors differ, "
                "and how.",
            ),
            None,
        ),
        "convert": (
            _Command(
                "checkpoint",
                "convert",
                "CONVERT_EXIT_CODES",
                "Write the model and the optimizer of a checkpoint in another format, bit by bit, without running a "
                "pickle.",
            ),
            None,
        ),
        "fingerprint": (
            _Command(
                "checkpoint",
                "fingerprint",
                "FINGERPRINT_EXIT_CODES",
                "Print 128 bits for each tensor of the model in a checkpoint, to compare it later, or with a model in "
                "training.",
            ),
            None,
        ),
    },
}


class _Commands(dict[str, Any]):
    """The commands of a group by name. A command is made when it is first looked up."""

    def __init__(self, group: str) -> None:
        self._sources = _TABLE[group]
        super().__init__(dict.fromkeys(self._sources))

    def __getitem__(self, name: str) -> Any:
        if super().__getitem__(name) is None:
            source, panel = self._sources[name]
            self[name] = source.make(name, panel)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def list_summaries(self) -> dict[str, Any]:
        """Returns commands that contain only the summary, which is all that the help of the group prints."""
        return {
            name: typer.core.TyperCommand(name, help=source.summary, rich_help_panel=panel)
            for name, (source, panel) in self._sources.items()
        }


class LazyGroup(typer.core.TyperGroup):
    """A group of commands in the table. Printing the group's help imports none of its commands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = self._lazy = _Commands(str(self.name))

    def get_params(self, ctx: Any) -> Any:
        return _name_values(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.commands = self._lazy.list_summaries()
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = self._lazy
