"""How far the matrix goes in each direction: the default matrix, what ``quick`` takes of it, what ``full`` adds to it.

The default matrix is the part that answers the first questions: both strategies, all eight of verl's flag
combinations, unstaged and staged, every path; on the way out after a training step, on the way in before the
first one, also from the meta device and with checkpoints that do not fit. The level ``full`` adds every other axis
value, one departure from the default at a time (and two where they are known to act together), each over the
offloads that behave differently. The level ``quick`` is for whoever waits: the scenarios that break most often, with
the paths that a framework is known to use.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from typing_extensions import assert_never

from fsdp_doctor.matrix.axes import AXES, AXIS
from fsdp_doctor.matrix.cases import Scenario, scenario_of
from fsdp_doctor.matrix.contracts import Direction

Level: TypeAlias = Literal["quick", "default", "full"]

_Values = Mapping[str, tuple[str, ...]]

_DEFAULT: _Values = {axis.name: (axis.default,) for axis in AXES} | {
    "strategy": ("fsdp2", "fsdp1"),
    "offload": tuple(AXIS["offload"].values),
    "staging": tuple(AXIS["staging"].values),
}
_DEFAULT_MATRIX: dict[Direction, _Values] = {"out": _DEFAULT, "in": {**_DEFAULT, "phase": ("fresh",)}}
_MANUAL = ("param", "optimizer", "param+optimizer")
_DISTINCT_OFFLOADS = ("none", *_MANUAL, "policy")
# A load before the first step finds no optimizer state that could have been moved.
_DISTINCT_FOR_LOADING = ("none", "param", "policy")


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A part of the matrix: these axis values, everything else at its default."""

    changes: dict[str, str]
    strategies: tuple[str, ...] = ("fsdp2", "fsdp1", "fsdp1-orig")
    offloads: tuple[str, ...] = _DISTINCT_OFFLOADS
    stagings: tuple[str, ...] = ("unstaged", "staged")

    def scenarios(self, direction: Direction, model: str) -> Iterable[Scenario]:
        axes = {"strategy": self.strategies, "offload": self.offloads, "staging": self.stagings}
        changed = {axis: (value,) for axis, value in self.changes.items()}
        return product(direction, {"model": (model,)} | axes | changed)


def _loading(strategies: tuple[str, ...], offloads: tuple[str, ...] = ("none",), **changes: str) -> Departure:
    return Departure(changes=changes, strategies=strategies, offloads=offloads, stagings=("unstaged",))


def _without_casts(strategies: tuple[str, ...], offload: str, staging: str, **changes: str) -> Departure:
    changes = {"precision": "fp32-compute"} | changes
    return Departure(changes=changes, strategies=strategies, offloads=(offload,), stagings=(staging,))


_BOTH, _ALL = ("fsdp2", "fsdp1"), ("fsdp2", "fsdp1", "fsdp1-orig")
_DEFAULT_DEPARTURES: dict[Direction, tuple[Departure, ...]] = {
    "out": (
        _without_casts(_BOTH, "none", "unstaged"),
        _without_casts(_BOTH, "param", "unstaged"),
        _without_casts(_BOTH, "policy", "staged"),
        Departure(
            changes={"context": "inference"}, strategies=("fsdp2",), offloads=("policy",), stagings=("unstaged",)
        ),
        Departure(changes={"context": "inference"}, strategies=("fsdp1",), offloads=("none",), stagings=("unstaged",)),
    ),
    "in": (
        _without_casts(("fsdp2",), "policy", "unstaged"),
        _without_casts(("fsdp1",), "none", "unstaged"),
        _without_casts(("fsdp1",), "policy", "staged"),
        _loading(_BOTH, context="inference"),
        _loading(("fsdp2",), ("none", "policy"), init="meta"),
        _loading(_BOTH, checkpoint="bf16"),
        _loading(_BOTH, checkpoint="fp32"),
        _loading(_BOTH, checkpoint="extra-key"),
        _loading(_BOTH, checkpoint="missing-key"),
        _loading(_BOTH, checkpoint="tied-twice", model="qwen3-tied"),
        _loading(_BOTH, checkpoint="tied-once", model="qwen3-tied"),
        _loading(_BOTH, checkpoint="other-run"),
        _loading(_BOTH, checkpoint="other-world"),
    ),
}

# Of what these axes depart to, the default matrix as a whole has some, with the paths that a framework is known to use.
_SAMPLED = ("precision", "context")
_MODELS = ("qwen3-tied", "qwen3-buffers", "qwen2", "qwen3-moe", "qwen3.5", "qwen3-lora")
_FULL_DEPARTURES: dict[Direction, tuple[Departure, ...]] = {
    "out": (
        Departure(changes={}, strategies=("fsdp1-orig",)),
        Departure(changes={"phase": "fresh"}),
        Departure(changes={"backend": "device-only"}),
        Departure(changes={"pinning": "unpinned"}, strategies=("fsdp2",), offloads=("policy",)),
        Departure(changes={"pinning": "unpinned", "phase": "fresh"}, strategies=("fsdp2",), offloads=("policy",)),
        Departure(changes={"transfer": "nonblocking"}, offloads=_MANUAL),
        Departure(changes={"dims": "uneven"}),
        Departure(changes={"dims": "uneven", "transfer": "nonblocking"}, offloads=_MANUAL),
        Departure(changes={"precision": "fp32-compute"}, offloads=("none", "param", "policy")),
        Departure(changes={"precision": "fp32-compute", "sharding": "size1"}, offloads=("none", "policy")),
        Departure(changes={"context": "no_grad"}, offloads=("none", "param", "policy")),
        Departure(changes={"context": "inference"}, offloads=("none", "param", "policy")),
        Departure(changes={"sharding": "hsdp"}),
        Departure(changes={"sharding": "size1"}),
        Departure(changes={"sharding": "tp"}, strategies=("fsdp2",)),
        Departure(changes={"sharding": "experts", "model": "qwen3-moe"}, strategies=("fsdp2",)),
        Departure(changes={"sharding": "replicate"}, strategies=("fsdp2",)),
        *(Departure(changes={"model": model}) for model in _MODELS),
    ),
    "in": (
        Departure(changes={}, strategies=("fsdp1-orig",)),
        _loading(_ALL, _DISTINCT_OFFLOADS, phase="trained"),
        _loading(_ALL, _DISTINCT_FOR_LOADING, backend="device-only"),
        _loading(("fsdp2",), ("policy",), pinning="unpinned"),
        _loading(_ALL, ("param",), transfer="nonblocking"),
        _loading(_ALL, _DISTINCT_FOR_LOADING, precision="fp32-compute"),
        _loading(_ALL, _DISTINCT_FOR_LOADING, precision="fp32-compute", phase="trained"),
        _without_casts(_ALL, "param", "staged"),
        _without_casts(_ALL, "policy", "staged"),
        _without_casts(_ALL, "policy", "staged", phase="trained"),
        _loading(("fsdp2",), ("none", "policy"), precision="fp32-compute", init="meta"),
        _loading(_ALL, _DISTINCT_FOR_LOADING, context="no_grad"),
        _loading(_ALL, _DISTINCT_FOR_LOADING, context="inference"),
        _loading(_ALL, _DISTINCT_FOR_LOADING, dims="uneven"),
        _loading(_ALL, _DISTINCT_FOR_LOADING, sharding="hsdp"),
        _loading(_ALL, _DISTINCT_FOR_LOADING, sharding="size1"),
        *(_loading(_ALL, _DISTINCT_FOR_LOADING, model=model) for model in _MODELS),
        _loading(("fsdp2",), ("none", "policy"), init="meta", dims="uneven"),
        _loading(("fsdp2",), ("none", "policy"), init="meta", backend="device-only"),
        *(_loading(("fsdp2",), ("none", "policy"), init="meta", model=model) for model in _MODELS),
        _loading(_ALL, ("param", "policy"), checkpoint="bf16"),
        _loading(_ALL, ("param", "policy"), checkpoint="fp32"),
        _loading(_ALL, ("param", "policy"), checkpoint="extra-key"),
        _loading(_ALL, ("param", "policy"), checkpoint="missing-key"),
        _loading(_ALL, _DISTINCT_FOR_LOADING, checkpoint="other-run"),
        _loading(_ALL, _DISTINCT_FOR_LOADING, checkpoint="other-world"),
        _loading(_ALL, dims="uneven", checkpoint="other-world"),
        _loading(("fsdp2",), ("none", "policy"), init="meta", checkpoint="bf16"),
        _loading(("fsdp2",), ("none", "policy"), init="meta", checkpoint="extra-key"),
        _loading(("fsdp2",), ("none", "policy"), init="meta", checkpoint="missing-key"),
        _loading(("fsdp2",), ("none", "policy"), init="meta", checkpoint="tied-twice", model="qwen3-tied"),
        _loading(("fsdp2",), ("none", "policy"), init="meta", checkpoint="tied-once", model="qwen3-tied"),
    ),
}


_QUICK: dict[Direction, tuple[dict[str, str], ...]] = {
    "out": (
        {"strategy": "fsdp2", "offload": "policy", "staging": "staged"},
        {"strategy": "fsdp1", "offload": "param", "staging": "unstaged"},
    ),
    "in": (
        {"strategy": "fsdp2", "offload": "none", "staging": "unstaged"},
        {"strategy": "fsdp2", "offload": "none", "staging": "unstaged", "init": "meta"},
    ),
}


def quick_scenarios(direction: Direction, model: str) -> Iterable[Scenario]:
    """Those of the default matrix in which most goes wrong, and a load in which nothing should."""
    for values in _QUICK[direction]:
        yield from product(direction, {axis: (value,) for axis, value in values.items()} | {"model": (model,)})


def is_sampled(scenario: Scenario) -> bool:
    """Whether the default matrix has the scenario only as a whole, and not where values of axes are asked for."""
    return any(getattr(scenario, axis) != AXIS[axis].default for axis in _SAMPLED)


def has_paths_in_use_alone(level: Level, scenario: Scenario, asked: bool) -> bool:
    """Whether a level has of the scenario only the paths that a framework is known to use.

    asked: whether values of axes were asked for.
    """
    match level:
        case "quick":
            return True
        case "default":
            return is_sampled(scenario) and not asked
        case "full":
            return False
        case _:
            assert_never(level)


def product(direction: Direction, chosen: _Values) -> Iterable[Scenario]:
    """Every combination of the chosen values, and on the other axes of those of the default matrix."""
    values = {**_DEFAULT_MATRIX[direction], **chosen}
    for combination in itertools.product(*(values[axis.name] for axis in AXES)):
        yield scenario_of({axis.name: value for axis, value in zip(AXES, combination, strict=True)})


def default_departures(direction: Direction) -> Iterable[Scenario]:
    """What the default matrix has beside the product of its values."""
    for departure in _DEFAULT_DEPARTURES[direction]:
        yield from departure.scenarios(direction, AXIS["model"].default)


def full_matrix(direction: Direction, model: str) -> Iterable[Scenario]:
    """The default matrix and every departure from it, with the model that the departures leave alone."""
    yield from product(direction, {"model": (model,)})
    for departure in (*_DEFAULT_DEPARTURES[direction], *_FULL_DEPARTURES[direction]):
        yield from departure.scenarios(direction, model)
