"""The options that select cases, and ``fsdp-doctor list``, which prints what they select or what there is."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast, get_args

import typer

from fsdp_doctor.cli.options import model_directory, one_of, split, word_list
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import AXES, AXIS, Axis, AxisName, Model
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.extent import Level
from fsdp_doctor.matrix.frameworks import FRAMEWORKS
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkPath
from fsdp_doctor.matrix.frameworks.framework_scenarios import frameworks_named
from fsdp_doctor.matrix.paths import PATHS, Path
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.layout import counted

LIST_EXIT_CODES = "Exit codes: 0 printed; 2 usage; 3 no case is selected; 4 the doctor's own fault."
_BUILT_IN_MODELS = tuple(str(model) for model in Model if not model.is_custom)


@dataclass(frozen=True, kw_only=True)
class Selected:
    """The selected cases, and the directory of the user's own model if one was given."""

    cases: tuple[AnyCase, ...]
    model: pathlib.Path | None


def axis_option(name: AxisName, default: str = "") -> Any:
    """An option that takes values of an axis."""
    return one_of(AXIS[name].values, f"--{name}", default=default)


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    PANEL: ClassVar[str] = "Selection"

    direction: Annotated[
        str, one_of((*get_args(Direction), "both"), help="out extracts weights, in loads them. One of")
    ] = "both"
    strategy: Annotated[list[str] | None, axis_option("strategy")] = None
    offload: Annotated[list[str] | None, axis_option("offload")] = None
    staging: Annotated[list[str] | None, axis_option("staging")] = None
    dims: Annotated[list[str] | None, axis_option("dims")] = None
    phase: Annotated[list[str] | None, axis_option("phase")] = None
    backend: Annotated[list[str] | None, axis_option("backend")] = None
    sharding: Annotated[list[str] | None, axis_option("sharding")] = None
    pinning: Annotated[list[str] | None, axis_option("pinning")] = None
    transfer: Annotated[list[str] | None, axis_option("transfer")] = None
    precision: Annotated[list[str] | None, axis_option("precision")] = None
    init: Annotated[list[str] | None, axis_option("init")] = None
    checkpoint: Annotated[list[str] | None, axis_option("checkpoint")] = None
    context: Annotated[list[str] | None, axis_option("context")] = None
    consumer: Annotated[list[str] | None, axis_option("consumer")] = None
    model: Annotated[
        list[str] | None,
        word_list(help=f"{', '.join(_BUILT_IN_MODELS)}; or the directory of a Hugging Face configuration."),
    ] = None
    method: Annotated[
        list[str] | None,
        word_list(
            "--method",
            "--path",
            help="Only this method (see `fsdp-doctor list --methods`); module:function adds a function of your own.",
        ),
    ] = None
    framework: Annotated[
        list[str] | None,
        word_list(help=f"Instead of the matrix, what {', '.join(FRAMEWORKS)} do themselves; all: those installed."),
    ] = None
    case: Annotated[list[str] | None, typer.Option(metavar="ID", help="One case, by its id.")] = None
    expression: Annotated[
        str, typer.Option("-k", metavar="EXPR", help="Words in case ids, joined by and, or, not, parentheses.")
    ] = ""
    level: Annotated[
        str | None,
        one_of(
            get_args(Level),
            help="quick (37 cases, less than 15 seconds on 2 cores: what breaks most often), default (about 1,400 "
            "cases), or full (about 12,000 cases: every axis). One of",
        ),
    ] = None
    full: Annotated[bool, typer.Option("--full", help="The same as --level full.")] = False
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Also run our own methods: full_tensors, local_shards, load_full_tensors, load_optimizer_state.",
        ),
    ] = False
    last_failed: Annotated[
        pathlib.Path | None, typer.Option(metavar="REPORT", help="The bad cases of an earlier JSON report.")
    ] = None

    def select(self) -> Selected:
        """Raises UsageError for a value, method or id that does not exist, CannotRun if no case is left."""
        if self.full and self.level not in (None, "full"):
            raise UsageError(f"--full is --level full, and cannot be combined with --level {self.level}")
        names = split(self.model)
        directories = [model_directory(name, _BUILT_IN_MODELS) for name in names if name not in _BUILT_IN_MODELS]
        if len(directories) > 1:
            raise UsageError("--model takes one directory")
        models = [name for name in names if name in _BUILT_IN_MODELS] + ["custom"] * len(directories)
        axes = {axis.name: getattr(self, axis.name) for axis in AXES} | {"model": models}
        selection = Selection(
            directions=() if self.direction == "both" else (cast(Direction, self.direction),),
            axes={axis: tuple(values) for axis, values in axes.items() if values},
            case_ids=(*(self.case or ()), *(_bad_cases(self.last_failed) if self.last_failed else ())),
            paths=tuple(self.method or ()),
            expression=self.expression,
            level="full" if self.full else cast(Level, self.level or "default"),
            fix=self.fix,
            custom_model=bool(directories),
            frameworks=tuple(frameworks_named(self.framework or ())),
        )
        return Selected(cases=tuple(select(selection)), model=directories[0] if directories else None)


def _bad_cases(file: pathlib.Path) -> tuple[str, ...]:
    from fsdp_doctor.report.journal import read_report

    bad = tuple(result.id for result in read_report(file).bad)
    if not bad:
        raise UsageError(f"--last-failed: {file} has no bad case")
    return bad


def list_cases(
    *,
    selection: SelectionOptions,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    methods: Annotated[
        bool, typer.Option("--methods", "--paths", help="Print the methods and what each promises, instead of cases.")
    ] = False,
    axes: Annotated[bool, typer.Option("--axes", help="Print the axes and their values, instead of cases.")] = False,
) -> None:
    """Print the selected cases, or the methods or axes; runs nothing."""
    matrices = [FRAMEWORKS[name] for name in frameworks_named(selection.framework or ())]
    all_methods = [path for matrix in matrices for path in matrix.paths] if matrices else PATHS
    all_axes = [axis for matrix in matrices for axis in matrix.axes] if matrices else AXES
    if methods:
        print(
            json.dumps(list(map(dataclasses.asdict, all_methods)), indent=1) if as_json else _method_lines(all_methods)
        )
    elif axes:
        print(json.dumps({a.name: a.values for a in all_axes}, indent=1) if as_json else _axis_lines(all_axes))
    else:
        cases = selection.select().cases
        rows = [{"id": case.id, "path": case.path, **case.scenario.to_json()} for case in cases]
        print(json.dumps(rows, indent=1) if as_json else "\n".join(case.id for case in cases))
        scenarios = {case.scenario for case in cases}
        print(f"{counted(len(cases), 'case')} in {counted(len(scenarios), 'scenario')}", file=sys.stderr)


def _method_lines(paths: Iterable[Path | FrameworkPath]) -> str:
    lines = []
    for path in paths:
        lines.append(f"{path.name}  [{_kind(path)}]")
        lines.append(f"    {path.summary}")
        if isinstance(path, Path) or path.kind == "extraction":
            contract = dataclasses.asdict(path.contract)
            lines.append(f"    promises {', '.join(f'{name} {value}' for name, value in contract.items())}")
        if isinstance(path, Path) and path.used_by:
            lines.append(f"    used by {path.used_by}")
    return "\n".join(lines)


def _kind(path: Path | FrameworkPath) -> str:
    if isinstance(path, FrameworkPath):
        return path.kind
    return f"{path.direction}, {'+'.join(f'fsdp{version}' for version in path.fsdp)}"


def _axis_lines(axes: Iterable[Axis]) -> str:
    lines = []
    for axis in axes:
        lines.append(f"{axis.name}  (default {axis.default})")
        lines += [f"    {value:<24}{meaning}" for value, meaning in axis.values.items()]
    return "\n".join(lines)
