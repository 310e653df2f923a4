"""Options that select cases, and ``fsdp-doctor list``, which prints the selected cases, or all methods or axes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast, get_args

import typer

from fsdp_doctor.cli.options import declare_choice, declare_words, find_model_directory, split
from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine.imports import find_source_file
from fsdp_doctor.machine.versions import read_installed_versions
from fsdp_doctor.matrix.axes import AXES, AXIS, Axis, AxisName, Model, describe_nearest
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.extent import Level
from fsdp_doctor.matrix.frameworks.adapters import BUILT_IN
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkMethod, read_matrix
from fsdp_doctor.matrix.frameworks.framework_scenarios import find_frameworks
from fsdp_doctor.matrix.methods import METHODS, MatrixMethod, is_user_method
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.text import format_count

LIST_EXIT_CODES = "Exit codes: 0 printed; 2 usage; 3 no case is selected; 4 the doctor's own fault."
_BUILT_IN_MODELS = tuple(str(model) for model in Model if not model.is_custom)


@dataclass(frozen=True, kw_only=True)
class Selected:
    """The selected cases, and the directory of the user's model if there is one."""

    cases: tuple[AnyCase, ...]
    model: pathlib.Path | None


def declare_axis(name: AxisName, default: str = "") -> Any:
    """Declares an option that takes values of an axis."""
    return declare_choice(AXIS[name].values, f"--{name}", default=default)


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    PANEL: ClassVar[str] = "Selection"

    direction: Annotated[
        str, declare_choice((*get_args(Direction), "both"), help="out extracts weights, in loads them. One of")
    ] = "both"
    strategy: Annotated[list[str] | None, declare_axis("strategy")] = None
    offload: Annotated[list[str] | None, declare_axis("offload")] = None
    staging: Annotated[list[str] | None, declare_axis("staging")] = None
    dims: Annotated[list[str] | None, declare_axis("dims")] = None
    phase: Annotated[list[str] | None, declare_axis("phase")] = None
    backend: Annotated[list[str] | None, declare_axis("backend")] = None
    sharding: Annotated[list[str] | None, declare_axis("sharding")] = None
    pinning: Annotated[list[str] | None, declare_axis("pinning")] = None
    transfer: Annotated[list[str] | None, declare_axis("transfer")] = None
    precision: Annotated[list[str] | None, declare_axis("precision")] = None
    optimizer: Annotated[list[str] | None, declare_axis("optimizer")] = None
    init: Annotated[list[str] | None, declare_axis("init")] = None
    checkpoint: Annotated[list[str] | None, declare_axis("checkpoint")] = None
    context: Annotated[list[str] | None, declare_axis("context")] = None
    consumer: Annotated[list[str] | None, declare_axis("consumer")] = None
    model: Annotated[
        list[str] | None,
        declare_words(help=f"{', '.join(_BUILT_IN_MODELS)}; or the directory of a Hugging Face configuration."),
    ] = None
    method: Annotated[
        list[str] | None,
        declare_words(
            "--method",
            help="Only this method (see `fsdp-doctor list --methods`); module:function adds a function of your own.",
        ),
    ] = None
    framework: Annotated[
        list[str] | None,
        declare_words(
            help=(
                f"Run these frameworks' own code instead of the matrix: {', '.join(BUILT_IN)}; module:ADAPTER for "
                "your own adapter; all for the installed ones."
            )
        ),
    ] = None
    case: Annotated[list[str] | None, typer.Option(metavar="ID", help="One case, by its id.")] = None
    expression: Annotated[
        str, typer.Option("-k", metavar="EXPR", help="Words in case ids, joined by and, or, not, parentheses.")
    ] = ""
    level: Annotated[
        str | None,
        declare_choice(
            get_args(Level),
            help="quick (37 cases, less than 15 seconds on 2 cores: what breaks most often), default (about 1,780 "
            "cases), or full (about 17,100 cases: every axis). One of",
        ),
    ] = None
    full: Annotated[bool, typer.Option("--full", help="The same as --level full.")] = False
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help=(
                "Also run this library's methods: full_tensors, local_shards, load_full_tensors, "
                "load_optimizer_state, and those that save. With --framework: also run each method that has a "
                "fix with its function replaced."
            ),
        ),
    ] = False
    last_failed: Annotated[
        pathlib.Path | None, typer.Option(metavar="REPORT", help="The bad cases of an earlier JSON report.")
    ] = None

    def select(self) -> Selected:
        """Selects the cases. Raises UsageError for an unknown value, method or id, and CannotRun if no case is left."""
        if self.full and self.level not in (None, "full"):
            raise UsageError(f"--full is --level full, and cannot be combined with --level {self.level}")
        for name in filter(is_user_method, self.method or ()):
            _check_user_method(name)
        names = split(self.model)
        directories = [find_model_directory(name, _BUILT_IN_MODELS) for name in names if name not in _BUILT_IN_MODELS]
        if len(directories) > 1:
            raise UsageError("--model takes one directory")
        models = [name for name in names if name in _BUILT_IN_MODELS] + ["custom"] * len(directories)
        axes = {axis.name: getattr(self, axis.name) for axis in AXES} | {"model": models}
        selection = Selection(
            directions=() if self.direction == "both" else (cast(Direction, self.direction),),
            axes={axis: tuple(values) for axis, values in axes.items() if values},
            case_ids=(*(self.case or ()), *(_read_bad_cases(self.last_failed) if self.last_failed else ())),
            methods=tuple(self.method or ()),
            expression=self.expression,
            level="full" if self.full else cast(Level, self.level or "default"),
            fix=self.fix,
            custom_model=bool(directories),
            frameworks=tuple(find_frameworks(self.framework or ())),
        )
        return Selected(cases=tuple(select(selection)), model=directories[0] if directories else None)


def _check_user_method(name: str) -> None:
    """Raises UsageError if ``module:function`` does not exist, without importing the module."""
    module, _, function = name.partition(":")
    try:
        file = find_source_file(module, pathlib.Path.cwd())
    except ModuleNotFoundError as error:
        raise UsageError(f"--method {name}: {error}, neither in this directory nor on Python's path") from None
    text = file.read_text(encoding="utf-8", errors="replace") if file is not None else ""
    if file is None or re.search(rf"\b{re.escape(function)}\b|import \*|__getattr__|globals\(", text):
        return
    nearest = describe_nearest(function, re.findall(r"^(?:async )?(?:def|class) (\w+)", text, re.MULTILINE))
    raise UsageError(f"--method {name}: {file} has no {function}{nearest}")


def _read_bad_cases(file: pathlib.Path) -> tuple[str, ...]:
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
        bool, typer.Option("--methods", help="Print the methods and what each promises, instead of cases.")
    ] = False,
    axes: Annotated[bool, typer.Option("--axes", help="Print the axes and their values, instead of cases.")] = False,
) -> None:
    """Print the selected cases, or the methods or axes; runs nothing."""
    matrices = [read_matrix(name) for name in find_frameworks(selection.framework or ())]
    all_methods = [method for matrix in matrices for method in matrix.methods] if matrices else METHODS
    all_axes = [axis for matrix in matrices for axis in matrix.axes] if matrices else AXES
    if methods:
        print(
            json.dumps(list(map(dataclasses.asdict, all_methods)), indent=1)
            if as_json
            else _render_methods(all_methods)
        )
    elif axes:
        print(json.dumps({a.name: a.values for a in all_axes}, indent=1) if as_json else _render_axes(all_axes))
    else:
        cases = selection.select().cases
        rows = [{"id": case.id, "method": case.method, **case.scenario.to_json()} for case in cases]
        # Flushed, so that the count comes after the last id where both streams share a pipe.
        print(json.dumps(rows, indent=1) if as_json else "\n".join(case.id for case in cases), flush=True)
        scenarios = {case.scenario for case in cases}
        print(f"{format_count(len(cases), 'case')} in {format_count(len(scenarios), 'scenario')}", file=sys.stderr)
        for matrix in matrices:
            if sentence := matrix.describe_untried(read_installed_versions(matrix.tried)):
                print(f"note: {sentence}", file=sys.stderr)


def _render_methods(methods: Iterable[MatrixMethod | FrameworkMethod]) -> str:
    lines = []
    for method in methods:
        lines.append(f"{method.name}  [{_name_kind(method)}]")
        lines.append(f"    {method.summary}")
        if isinstance(method, MatrixMethod) or method.kind == "extraction":
            contract = dataclasses.asdict(method.contract)
            lines.append(f"    promises {', '.join(f'{name} {value}' for name, value in contract.items())}")
        if isinstance(method, MatrixMethod) and method.used_by:
            lines.append(f"    used by {method.used_by}")
    return "\n".join(lines)


def _name_kind(method: MatrixMethod | FrameworkMethod) -> str:
    if isinstance(method, FrameworkMethod):
        return method.kind
    return f"{method.direction}, {'+'.join(f'fsdp{version}' for version in method.fsdp)}"


def _render_axes(axes: Iterable[Axis]) -> str:
    lines = []
    for axis in axes:
        lines.append(f"{axis.name}  (default {axis.default})")
        lines += [f"    {value:<24}{meaning}" for value, meaning in axis.values.items()]
    return "\n".join(lines)
