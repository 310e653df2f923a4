"""The options that select cases, and the cases that they select."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast, get_args

import typer

from fsdp_doctor.cli import values
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import AXES, AXIS, AxisName
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.extent import Level
from fsdp_doctor.matrix.frameworks import FRAMEWORKS
from fsdp_doctor.matrix.frameworks.framework_scenarios import frameworks_named
from fsdp_doctor.matrix.selection import Selection, select

_BUILT_IN_MODELS = tuple(name for name in AXIS["model"].values if name != "custom")


@dataclass(frozen=True, kw_only=True)
class Selected:
    """The selected cases, and the directory of the user's own model, if one was given."""

    cases: tuple[AnyCase, ...]
    model: pathlib.Path | None


def _axis(name: AxisName) -> Any:
    meanings = AXIS[name].values
    return typer.Option(f"--{name}", help=f"{', '.join(meanings)}.", autocompletion=lambda: list(meanings.items()))


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    PANEL: ClassVar[str] = "Selection"

    direction: Annotated[
        str,
        typer.Option("--direction", help="out (extract weights), in (load them), or both."),
    ] = "both"
    strategy: Annotated[list[str] | None, _axis("strategy")] = None
    offload: Annotated[list[str] | None, _axis("offload")] = None
    staging: Annotated[list[str] | None, _axis("staging")] = None
    dims: Annotated[list[str] | None, _axis("dims")] = None
    phase: Annotated[list[str] | None, _axis("phase")] = None
    backend: Annotated[list[str] | None, _axis("backend")] = None
    sharding: Annotated[list[str] | None, _axis("sharding")] = None
    pinning: Annotated[list[str] | None, _axis("pinning")] = None
    transfer: Annotated[list[str] | None, _axis("transfer")] = None
    precision: Annotated[list[str] | None, _axis("precision")] = None
    init: Annotated[list[str] | None, _axis("init")] = None
    checkpoint: Annotated[list[str] | None, _axis("checkpoint")] = None
    context: Annotated[list[str] | None, _axis("context")] = None
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help=f"{', '.join(_BUILT_IN_MODELS)}; or the directory of a Hugging Face configuration."
        ),
    ] = None
    path: Annotated[
        list[str] | None,
        typer.Option(
            "--path",
            help="Only this path (see `fsdp-doctor list --paths`); module:function adds a function of your own.",
        ),
    ] = None
    framework: Annotated[
        list[str] | None,
        typer.Option(
            "--framework",
            help=f"Instead of the matrix, what {', '.join(FRAMEWORKS)} do themselves; all: those installed.",
        ),
    ] = None
    case: Annotated[list[str] | None, typer.Option("--case", metavar="ID", help="One case, by its id.")] = None
    expression: Annotated[
        str, typer.Option("-k", metavar="EXPR", help="Words in case ids, joined by and, or, not, parentheses.")
    ] = ""
    level: Annotated[
        str | None,
        typer.Option(
            "--level",
            help="quick (37 cases, less than 15 seconds on 2 cores: what breaks most often), default (1,393 cases), or "
            "full (12,249 cases: every axis).",
        ),
    ] = None
    full: Annotated[bool, typer.Option("--full", help="The same as --level full.")] = False
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Also run our own paths: full_tensors, local_shards, load_full_tensors, load_optimizer_state.",
        ),
    ] = False
    last_failed: Annotated[
        pathlib.Path | None,
        typer.Option("--last-failed", metavar="REPORT", help="The bad cases of an earlier JSON report."),
    ] = None

    def select(self) -> Selected:
        """Raises UsageError for a value, path or id that does not exist, CannotRun where no case is left."""
        built_in, directory = _models(values.split(self.model))
        of_axes = {axis.name: getattr(self, axis.name) for axis in AXES} | {"model": built_in}
        selection = Selection(
            directions=_directions(self.direction),
            axes={axis: tuple(values.split(given)) for axis, given in of_axes.items() if given},
            case_ids=(*(self.case or ()), *(_bad_cases(self.last_failed) if self.last_failed else ())),
            paths=tuple(values.split(self.path)),
            expression=self.expression,
            level=_level(self.level, self.full),
            fix=self.fix,
            custom_model=directory is not None,
            frameworks=tuple(frameworks_named(values.split(self.framework))),
        )
        return Selected(cases=tuple(select(selection)), model=directory)


def _level(named: str | None, full: bool) -> Level:
    if named is not None and named not in get_args(Level):
        raise UsageError(f"--level: unknown value {named!r}; use one of {', '.join(get_args(Level))}")
    if full and named not in (None, "full"):
        raise UsageError(f"--full is --level full, and cannot be combined with --level {named}")
    return "full" if full else cast(Level, named or "default")


def _directions(word: str) -> tuple[Direction, ...]:
    if word not in _DIRECTIONS:
        raise UsageError(f"--direction: unknown value {word!r}; use one of {', '.join(_DIRECTIONS)}")
    return _DIRECTIONS[word]


_DIRECTIONS: dict[str, tuple[Direction, ...]] = {"out": ("out",), "in": ("in",), "both": ()}


def _bad_cases(file: pathlib.Path) -> tuple[str, ...]:
    from fsdp_doctor.report.journal import read_report

    bad = tuple(result.id for result in read_report(file).bad)
    if not bad:
        raise UsageError(f"--last-failed: {file} has no bad case")
    return bad


def _models(names: list[str]) -> tuple[list[str], pathlib.Path | None]:
    """Separates the built-in models from a directory."""
    built_in = [name for name in names if name in _BUILT_IN_MODELS]
    directories = [values.model_directory(name, _BUILT_IN_MODELS) for name in names if name not in _BUILT_IN_MODELS]
    if len(directories) > 1:
        raise UsageError("--model takes one directory")
    if not directories:
        return built_in, None
    return [*built_in, "custom"], directories[0]
