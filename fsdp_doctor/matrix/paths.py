"""The paths under test, those that extract and those that load.

This table is read without torch. The functions behind the names are in ``case/paths``.
"""

from __future__ import annotations

import functools

from fsdp_doctor.matrix.cases import AnyCase, Scenario
from fsdp_doctor.matrix.contracts import Contract, Direction
from fsdp_doctor.matrix.extraction_paths import EXTRACTION_PATHS, FIX
from fsdp_doctor.matrix.frameworks.framework_scenarios import FrameworkCase
from fsdp_doctor.matrix.loading_paths import LOADING_FIX, LOADING_PATHS, OPTIMIZER_FIX
from fsdp_doctor.matrix.path import Path

PATHS: tuple[Path, ...] = (*EXTRACTION_PATHS, *LOADING_PATHS)
FIXES: frozenset[str] = frozenset(path.name for path in PATHS if path.is_fix)

PATH_NAMES: tuple[str, ...] = tuple(dict.fromkeys(path.name for path in PATHS))


def is_user_path(name: str) -> bool:
    """Whether ``name`` is a ``module:function`` of the user rather than a row of the table."""
    return ":" in name


def paths_for(scenario: Scenario, direction: Direction | None = None) -> tuple[Path, ...]:
    """The rows that make sense in a scenario, the fixes among them; those of one direction if one is given."""
    return tuple(path for path in PATHS if path.applies(scenario) and direction in (None, path.direction))


# What fits a model otherwise than the exact one: of the weights, there is none of an optimizer's state.
_CHECKPOINTS_OF_WEIGHTS = ("bf16", "extra-key", "missing-key")


def impossible(path: Path, scenario: Scenario) -> str:
    """Why the path cannot be tried in the scenario, wherever it runs; empty if it can."""
    if path.direction == "out" and path.contract.form == "optimizer" and scenario.phase == "fresh":
        return "there is no optimizer state before the first step"
    if path.direction == "in" and path.contract.loads != "model":
        if scenario.init == "meta":
            return "an optimizer is loaded beside a model that has its weights, not beside one on the meta device"
        if scenario.checkpoint in _CHECKPOINTS_OF_WEIGHTS:
            return f"{scenario.checkpoint} is a checkpoint of weights, and {path.name} loads an optimizer"
    if path.without_mesh and scenario.sharding != "full":
        return f"{path.name} needs a model without a device mesh, and {scenario.sharding} is built with one"
    if path.contract.form == "flat" and scenario.strategy == "fsdp1-orig":
        return "torch has LOCAL_STATE_DICT only for use_orig_params=False"
    return scenario.contradiction


@functools.cache
def find_path(name: str, fsdp: int) -> Path:
    """The row of that name for FSDP1 or FSDP2; a ``module:function`` gets a row of its own."""
    if is_user_path(name):
        return Path(name=name, fsdp=(1, 2), contract=Contract(), function=name, summary=f"{name}(model)")
    return next(path for path in PATHS if path.name == name and fsdp in path.fsdp)


def direction_of(case: AnyCase) -> Direction:
    """Whether the path of a case extracts or loads, of the matrix or of a framework."""
    if isinstance(case, FrameworkCase):
        return case.way.direction
    return find_path(case.path, case.scenario.version).direction


def fix_for(name: str, fsdp: int) -> str:
    """The name of our own path that does what the path of that name does."""
    contract = find_path(name, fsdp).contract
    if contract.form == "local":
        return name
    if contract.direction == "out":
        return FIX
    return LOADING_FIX if contract.loads == "model" else OPTIMIZER_FIX
