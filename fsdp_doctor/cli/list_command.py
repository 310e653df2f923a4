"""``fsdp-doctor list``: what the options select, or what there is to select from."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from fsdp_doctor.cli.selecting import SelectionOptions
from fsdp_doctor.cli.values import split
from fsdp_doctor.matrix.axes import AXES, Axis
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.matrix.frameworks import FRAMEWORKS
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkPath
from fsdp_doctor.matrix.frameworks.framework_scenarios import frameworks_named
from fsdp_doctor.matrix.paths import PATHS, Path
from fsdp_doctor.report.layout import counted

NAME = "list"
EXIT_CODES = "Exit codes: 0 printed; 2 usage; 3 no case is selected; 4 the doctor's own fault."


def run(
    *,
    selection: SelectionOptions,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    paths: Annotated[
        bool, typer.Option("--paths", help="Print the paths and what each promises, instead of cases.")
    ] = False,
    axes: Annotated[bool, typer.Option("--axes", help="Print the axes and their values, instead of cases.")] = False,
) -> None:
    """Print the selected cases, or the paths or axes; runs nothing."""
    matrices = [FRAMEWORKS[name] for name in frameworks_named(split(selection.framework))]
    all_paths = [path for matrix in matrices for path in matrix.paths] if matrices else PATHS
    all_axes = [axis for matrix in matrices for axis in matrix.axes] if matrices else AXES
    if paths:
        print(json.dumps(list(map(dataclasses.asdict, all_paths)), indent=1) if as_json else _paths_as_text(all_paths))
    elif axes:
        print(json.dumps({a.name: a.values for a in all_axes}, indent=1) if as_json else _axes_as_text(all_axes))
    else:
        cases = selection.select().cases
        rows = [_row(case) for case in cases]
        print(json.dumps(rows, indent=1) if as_json else "\n".join(case.id for case in cases))
        scenarios = {case.scenario for case in cases}
        print(f"{counted(len(cases), 'case')} in {counted(len(scenarios), 'scenario')}", file=sys.stderr)


def _row(case: AnyCase) -> dict[str, str]:
    return {"id": case.id, "path": case.path, **case.scenario.to_json()}


def _paths_as_text(paths: Iterable[Path | FrameworkPath]) -> str:
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


def _axes_as_text(axes: Iterable[Axis]) -> str:
    lines = []
    for axis in axes:
        lines.append(f"{axis.name}  (default {axis.default})")
        lines += [f"    {value:<24}{meaning}" for value, meaning in axis.values.items()]
    return "\n".join(lines)
