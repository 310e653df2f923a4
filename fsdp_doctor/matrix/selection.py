"""Which cases a command means: the default matrix, ``--full``, or what the options pick.

The default matrix is the part that answers the first questions: both strategies, all eight of
verl's flag combinations, unstaged and staged, after a training step, every path. ``--full``
adds every other axis value, one departure from the default at a time (and two departures where
they are known to act together), each over the offloads that behave differently. Options that name
axis values then leave out what does not have them; they never add to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.matrix.axes import AXES, AXIS, check_axis_value, nearest
from fsdp_doctor.matrix.cases import Case, Scenario, parse_case_id, scenario_of
from fsdp_doctor.matrix.expression import compile_expression
from fsdp_doctor.matrix.paths import FIX, PATH_NAMES, is_user_path, paths_for

_DEFAULT_MATRIX: dict[str, tuple[str, ...]] = {axis.name: (axis.default,) for axis in AXES} | {
    "strategy": ("fsdp2", "fsdp1"),
    "offload": tuple(AXIS["offload"].values),
    "staging": tuple(AXIS["staging"].values),
}
_MANUAL = ("param", "optimizer", "param+optimizer")
_DISTINCT_OFFLOADS = ("none", *_MANUAL, "policy")


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A part of ``--full``: these axis values, everything else at its default."""

    changes: dict[str, str]
    strategies: tuple[str, ...] = ("fsdp2", "fsdp1", "fsdp1-orig")
    offloads: tuple[str, ...] = _DISTINCT_OFFLOADS


_DEPARTURES: tuple[Departure, ...] = (
    Departure(changes={}, strategies=("fsdp1-orig",)),
    Departure(changes={"phase": "fresh"}),
    Departure(changes={"backend": "device-only"}),
    Departure(changes={"pinning": "unpinned"}, strategies=("fsdp2",), offloads=("policy",)),
    Departure(changes={"pinning": "unpinned", "phase": "fresh"}, strategies=("fsdp2",), offloads=("policy",)),
    Departure(changes={"transfer": "nonblocking"}, offloads=_MANUAL),
    Departure(changes={"dims": "uneven"}),
    Departure(changes={"dims": "uneven", "transfer": "nonblocking"}, offloads=_MANUAL),
    Departure(changes={"sharding": "hsdp"}),
    Departure(changes={"sharding": "size1"}),
    Departure(changes={"model": "qwen3-tied"}),
    Departure(changes={"model": "qwen3-buffers"}),
    Departure(changes={"model": "qwen2"}),
    Departure(changes={"model": "qwen3-moe"}),
    Departure(changes={"model": "qwen3.5"}),
    Departure(changes={"model": "qwen3-lora"}),
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the user asked for, as the options say it. Empty means: not asked."""

    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    case_ids: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    expression: str = ""
    full: bool = False
    fix: bool = False
    custom_model: bool = False


def select(selection: Selection) -> list[Case]:
    """The selected cases, in the order in which they run: scenarios one after the other.

    Raises UsageError for a value, id or path that does not exist, CannotRun where nothing is left.
    """
    user_paths = tuple(name for name in selection.paths if is_user_path(name))
    if selection.case_ids:
        cases = [_named_case(case_id, selection) for case_id in selection.case_ids]
        if selection.fix:
            cases += [Case(case.scenario, FIX) for case in cases]
    else:
        cases = list(_cases(_scenarios(selection), selection, user_paths))
    if selection.expression:
        matches = compile_expression(selection.expression)
        cases = [case for case in cases if matches(case.id) or (selection.fix and case.path == FIX)]
        kept = {case.scenario for case in cases if case.path != FIX or matches(case.id)}
        cases = [case for case in cases if case.scenario in kept]
    if not cases:
        raise CannotRun("no case is selected; `fsdp-doctor list` prints what the same options select")
    return _by_generation(dict.fromkeys(cases))


def _named_case(case_id: str, selection: Selection) -> Case:
    """The case of an id, which says everything: the options that select along axes do not go with it."""
    beside = [f"--{axis}" for axis, values in selection.axes.items() if values != ("custom",)]
    beside += ["--path"] * bool(selection.paths) + ["--full"] * selection.full
    if beside:
        raise UsageError(f"--case and --last-failed name whole cases: they cannot be combined with {', '.join(beside)}")
    case = parse_case_id(case_id, PATH_NAMES)
    if not is_user_path(case.path) and case.path not in {path.name for path in paths_for(case.scenario)}:
        raise UsageError(
            f"case {case_id!r}: {case.scenario.id} has no path {case.path!r}; `fsdp-doctor list --paths` prints them"
        )
    if case.scenario.model == "custom" and not selection.custom_model:
        raise UsageError(f"case {case_id!r} needs a model of your own: add --model DIR")
    return case


def _scenarios(selection: Selection) -> list[Scenario]:
    """The scenarios that have the values asked for: of the full matrix with ``--full``, else of their product.

    So a filter beside ``--full`` leaves cases out and adds none. Where the full matrix has nothing of what is asked
    for, because it departs from the default in one axis at a time and two were named, it is as without ``--full``:
    the values asked for, and the defaults on every other axis.
    """
    for axis, values in selection.axes.items():
        for value in values:
            check_axis_value(axis, value)
    asked = dict(selection.axes)
    if selection.custom_model:
        asked.setdefault("model", ("custom",))
    if selection.full:
        model = "custom" if selection.custom_model else AXIS["model"].default
        if found := [scenario for scenario in _full_matrix(model) if _has(scenario, asked)]:
            return found
    return list(_product(asked))


def _full_matrix(model: str) -> Iterable[Scenario]:
    """The default matrix and every departure from it, with the model that the departures leave alone."""
    yield from _product({"model": (model,)})
    for departure in _DEPARTURES:
        changed = {axis: (value,) for axis, value in departure.changes.items()}
        values = {"model": (model,), "strategy": departure.strategies, "offload": departure.offloads}
        yield from _product(values | changed)


def _has(scenario: Scenario, asked: dict[str, tuple[str, ...]]) -> bool:
    return all(getattr(scenario, axis) in values for axis, values in asked.items())


def _product(chosen: dict[str, tuple[str, ...]]) -> Iterable[Scenario]:
    """Every combination of the chosen values, and on the other axes of those of the default matrix."""
    values = _DEFAULT_MATRIX | chosen
    for combination in itertools.product(*(values[axis.name] for axis in AXES)):
        yield scenario_of({axis.name: value for axis, value in zip(AXES, combination, strict=True)})


def _cases(scenarios: Iterable[Scenario], selection: Selection, user_paths: Sequence[str]) -> Iterable[Case]:
    named = [name for name in selection.paths if not is_user_path(name)]
    for name in named:
        if name not in PATH_NAMES:
            raise UsageError(
                f"--path: there is no path {name!r}{nearest(name, PATH_NAMES)}; "
                "`fsdp-doctor list --paths` prints them, and module:function adds one of your own"
            )
    for scenario in scenarios:
        for path in paths_for(scenario):
            asked = path.name in named if named else not path.is_fix
            if asked or (path.is_fix and selection.fix):
                yield Case(scenario, path.name)
        for name in user_paths:
            yield Case(scenario, name)


def _by_generation(cases: Iterable[Case]) -> list[Case]:
    """Cases of one scenario together, and scenarios of one backend together: each needs its own workers."""
    backends = list(AXIS["backend"].values)
    first_seen: dict[Scenario, int] = {}
    for case in cases:
        first_seen.setdefault(case.scenario, len(first_seen))
    return sorted(cases, key=lambda case: (backends.index(case.scenario.backend), first_seen[case.scenario]))
