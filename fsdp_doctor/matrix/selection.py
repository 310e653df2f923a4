"""Selects the cases that a command runs: the default matrix, another level, or the cases that options name.

Options that name axis values remove from the levels ``quick`` and ``full`` the cases without these values; they never
add cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.matrix.axes import AXIS, check_axis_value, describe_nearest
from fsdp_doctor.matrix.cases import AnyCase, AnyScenario, Case, Scenario, parse_case_id
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.matrix.expression import compile_expression, find_unmatched_words
from fsdp_doctor.matrix.extent import (
    Level,
    has_methods_in_use_alone,
    is_sampled,
    list_default_variants,
    list_full_matrix,
    list_product,
    list_quick_scenarios,
)
from fsdp_doctor.matrix.frameworks.framework_matrix import read_matrix
from fsdp_doctor.matrix.frameworks.framework_scenarios import (
    FrameworkCase,
    check_methods,
    is_framework_id,
    list_scenarios,
    parse_framework_id,
)
from fsdp_doctor.matrix.methods import METHOD_NAMES, is_user_method, list_methods


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Options with which a user selects cases. An empty field means that the option was not given.

    directions: the directions of the methods; both if empty.
    frameworks: the frameworks whose cases are selected instead of the matrix; the matrix if empty.
    """

    directions: tuple[Direction, ...] = ()
    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    case_ids: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    expression: str = ""
    level: Level = "default"
    fix: bool = False
    custom_model: bool = False
    frameworks: tuple[str, ...] = ()


def select(selection: Selection) -> list[AnyCase]:
    """Returns the selected cases, in the order in which they run: scenarios one after the other.

    Raises UsageError for an unknown value, id or method, CannotRun if no case is left.
    """
    user_methods = tuple(name for name in selection.methods if is_user_method(name))
    cases: list[AnyCase]
    if selection.case_ids:
        cases = [_parse_named_case(case_id, selection) for case_id in selection.case_ids]
        if selection.fix:
            cases += [fix for case in cases for fix in _list_fixes(case)]
    elif selection.frameworks:
        cases = list(_list_framework_cases(selection))
    else:
        cases = list(_list_cases(selection, user_methods))
    before = cases
    if selection.expression:
        matches = compile_expression(selection.expression)
        matching = [case for case in cases if matches(case.id)]
        beside = {fix for case in matching for fix in _list_fixes(case)} if selection.fix else set()
        cases = [case for case in cases if case in beside or matches(case.id)]
    if not cases:
        unmatched = find_unmatched_words(selection.expression, [case.id for case in before])
        why = f": no case id in this selection has {' or '.join(map(repr, unmatched))}" if unmatched else ""
        raise CannotRun(
            f"no case is selected{why}; `fsdp-doctor list --axes` and `fsdp-doctor list --methods` print the words of "
            "case ids"
        )
    return _sort_by_generation(dict.fromkeys(cases))


def _parse_named_case(case_id: str, selection: Selection) -> AnyCase:
    """Returns the case of an id. Raises UsageError if options that select along axes are given, too."""
    beside = [f"--{axis}" for axis, values in selection.axes.items() if values != ("custom",)]
    beside += ["--method"] * bool(selection.methods) + [f"--level {selection.level}"] * (selection.level != "default")
    beside += ["--framework"] * bool(selection.frameworks)
    if beside:
        raise UsageError(f"--case and --last-failed name whole cases: they cannot be combined with {', '.join(beside)}")
    if is_framework_id(case_id):
        return parse_framework_id(case_id)
    case = parse_case_id(case_id, METHOD_NAMES)
    if not is_user_method(case.method) and case.method not in {method.name for method in list_methods(case.scenario)}:
        raise UsageError(
            f"case {case_id!r}: {case.scenario.id} has no method {case.method!r}; `fsdp-doctor list --methods` prints "
            "them"
        )
    if case.scenario.model.is_custom and not selection.custom_model:
        raise UsageError(f"case {case_id!r} needs your own model: add --model DIR")
    return case


def _list_framework_cases(selection: Selection) -> Iterable[FrameworkCase]:
    """Lists the methods of each framework, or only the named methods, in the configurations of the level."""
    beside = [f"--{axis}" for axis in selection.axes]
    beside += ["--level full"] * (selection.level == "full")
    if beside:
        raise UsageError(
            f"--framework has its own axes and cannot be combined with {', '.join(beside)}; use -k to select "
            "configurations by the words of their ids"
        )
    check_methods(selection.frameworks, selection.methods)
    if selection.fix and not any(method.fix for name in selection.frameworks for method in read_matrix(name).methods):
        names = " or ".join(selection.frameworks)
        raise UsageError(f"--fix: there is no fix for a method of {names}; docs/frameworks.md has a table of fixes")
    directions = selection.directions or ("out", "in")
    for framework in selection.frameworks:
        for scenario in list_scenarios(framework, quick=selection.level == "quick"):
            for method in scenario.list_methods():
                if method.direction in directions and method.name in (selection.methods or (method.name,)):
                    case = FrameworkCase(scenario, method.name)
                    yield from (case, *(_list_fixes(case) if selection.fix else ()))


def _list_fixes(case: AnyCase) -> list[AnyCase]:
    """Lists the fixes for a case: in the matrix, the fixes of its scenario; for a framework, the case with ``+fix``."""
    if isinstance(case, FrameworkCase):
        fixed = case.make_fixed()
        return [fixed] if fixed is not None else []
    directions = {method.direction for method in list_methods(case.scenario) if method.name == case.method}
    return [
        Case(case.scenario, method.name)
        for method in list_methods(case.scenario)
        if method.is_fix and (method.direction in directions or is_user_method(case.method))
    ]


def _list_scenarios(selection: Selection, direction: Direction) -> Iterable[Scenario]:
    """Lists the scenarios with the requested values: scenarios of the level ``quick`` or ``full``, or else the product
    of the values.

    A filter with ``full`` removes cases and adds none. The full matrix varies one axis at a time, so it may have no
    case with all requested values. The result is then the same as without ``full``: these values, and the defaults on
    every other axis.
    """
    for axis, values in selection.axes.items():
        for value in values:
            check_axis_value(axis, value)
    asked = dict(selection.axes)
    if selection.custom_model:
        asked.setdefault("model", ("custom",))
    model = "custom" if selection.custom_model else AXIS["model"].default
    if selection.level == "quick":
        return [scenario for scenario in list_quick_scenarios(direction, model) if _has(scenario, asked)]
    if selection.level == "full":
        matching = dict.fromkeys(scenario for scenario in list_full_matrix(direction, model) if _has(scenario, asked))
        if matching:
            return matching
    variants = (
        scenario
        for scenario in list_default_variants(direction)
        # A step that raised, too, is tried beside other values where its phase is asked for.
        if not (asked and (is_sampled(scenario) or scenario.phase.raised))
    )
    return dict.fromkeys(
        [*list_product(direction, asked), *(scenario for scenario in variants if _has(scenario, asked))]
    )


def _has(scenario: Scenario, asked: dict[str, tuple[str, ...]]) -> bool:
    return all(scenario.values[axis] in values for axis, values in asked.items())


def _list_cases(selection: Selection, user_methods: Sequence[str]) -> Iterable[Case]:
    """Yields the selected cases of the matrix. Raises UsageError for an unknown method.

    A user's method is tried in the first direction that was asked for, by default ``out``.
    """
    named = [name for name in selection.methods if not is_user_method(name)]
    for name in named:
        if name not in METHOD_NAMES:
            raise UsageError(
                f"--method: there is no method {name!r}{describe_nearest(name, METHOD_NAMES)}; "
                "`fsdp-doctor list --methods` prints them, and module:function adds your own"
            )
    directions = selection.directions or ("out", "in")
    for direction in directions:
        for scenario in _list_scenarios(selection, direction):
            of_user = user_methods if direction == directions[0] else ()
            methods = list_methods(scenario, direction)
            in_use_alone = has_methods_in_use_alone(selection.level, scenario, bool(selection.axes))
            usual = {method.name for method in methods if not method.is_fix and (method.used_by or not in_use_alone)}
            asked = {method.name for method in methods if method.name in named} if named else usual
            with_fixes = selection.fix and bool(asked or of_user)
            yield from (
                Case(scenario, method.name)
                for method in methods
                if method.name in asked or (method.is_fix and with_fixes)
            )
            yield from (Case(scenario, name) for name in of_user)


def _sort_by_generation(cases: Iterable[AnyCase]) -> list[AnyCase]:
    """Sorts the cases so that the cases of one scenario, and the scenarios of one backend, are together.

    Each scenario of a framework, and each backend, needs its own workers. Cases of frameworks come last, grouped by
    framework.
    """
    first_seen: dict[AnyScenario, int] = {}
    order = list(AXIS["backend"].values)
    for case in cases:
        first_seen.setdefault(case.scenario, len(first_seen))
        order.append(_name_group(case))

    def find_place(case: AnyCase) -> tuple[int, int]:
        return order.index(_name_group(case)), first_seen[case.scenario]

    return sorted(cases, key=find_place)


def _name_group(case: AnyCase) -> str:
    return case.scenario.framework if isinstance(case, FrameworkCase) else case.scenario.backend
