"""``fsdp-doctor list``: what the options select, or what there is to select from."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer

from fsdp_doctor.cli.selecting import SelectionOptions
from fsdp_doctor.matrix.axes import AXES
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.matrix.paths import PATHS

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
    if paths:
        print(json.dumps([dataclasses.asdict(path) for path in PATHS], indent=1) if as_json else _paths_as_text())
    elif axes:
        print(json.dumps({axis.name: axis.values for axis in AXES}, indent=1) if as_json else _axes_as_text())
    else:
        cases = selection.select().cases
        rows = [_row(case) for case in cases]
        print(json.dumps(rows, indent=1) if as_json else "\n".join(case.id for case in cases))
        print(f"{len(cases)} cases in {len({case.scenario for case in cases})} scenarios", file=sys.stderr)


def _row(case: AnyCase) -> dict[str, str]:
    return {"id": case.id, "path": case.path, **dataclasses.asdict(case.scenario)}


def _paths_as_text() -> str:
    lines = []
    for path in PATHS:
        contract = dataclasses.asdict(path.contract)
        versions = "+".join(f"fsdp{version}" for version in path.fsdp)
        lines.append(f"{path.name}  [{path.direction}, {versions}]")
        lines.append(f"    {path.summary}")
        lines.append(f"    promises {', '.join(f'{name} {value}' for name, value in contract.items())}")
        if path.used_by:
            lines.append(f"    used by {path.used_by}")
    return "\n".join(lines)


def _axes_as_text() -> str:
    lines = []
    for axis in AXES:
        lines.append(f"{axis.name}  (default {axis.default})")
        lines += [f"    {value:<24}{meaning}" for value, meaning in axis.values.items()]
    return "\n".join(lines)
