"""Tests what ``--full`` selects beside the options that name axis values."""

from __future__ import annotations

import functools
import itertools

from fsdp_doctor.errors import CannotRun
from fsdp_doctor.matrix.axes import AXES, AXIS
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.selection import Selection, select

_LAST_VALUES = [{axis.name: (list(axis.values)[-1],)} for axis in AXES if axis.name != "model"]
# Every fourth pair of axes: one selection of the full matrix takes a while.
_TWO_VALUES = [a | b for a, b in itertools.combinations(_LAST_VALUES, 2)][::4]
# Two values that the full matrix has together nowhere.
_TOGETHER_NOWHERE = {"model": ("qwen3-moe",), "dims": ("uneven",)}


@functools.cache
def _whole() -> list[Case]:
    return _full()


def _full(**axes: tuple[str, ...]) -> list[Case]:
    return select(Selection(level="full", axes=axes))


def test_a_filter_with_full_keeps_exactly_the_cases_with_the_value() -> None:
    for axis in AXES:
        for value in set(axis.values) - {"custom"}:
            expected = [case for case in _whole() if case.scenario.values[axis.name] == value]
            assert _full(**{axis.name: (value,)}) == expected, (axis.name, value)


def test_two_filters_with_full_select_the_cases_common_to_both_filters() -> None:
    whole = set(_whole())
    met = 0
    for asked in _TWO_VALUES:
        try:
            selected = set(_full(**asked))
        except CannotRun:
            # Without our own methods nothing loads the Hub's files beside some optimizers.
            continue
        if selected <= whole:
            met += 1
            (first, one), (second, other) = asked.items()
            assert selected == set(_full(**{first: one})) & set(_full(**{second: other}))
    assert met > 1


def test_values_that_full_has_together_nowhere_are_taken_as_without_full() -> None:
    selected = _full(**_TOGETHER_NOWHERE)
    assert selected == select(Selection(axes=_TOGETHER_NOWHERE))
    assert {(case.scenario.model, case.scenario.dims) for case in selected} == {("qwen3-moe", "uneven")}


def test_the_parts_of_full_by_strategy_add_up_to_it() -> None:
    parts = [_full(strategy=(strategy,)) for strategy in AXIS["strategy"].values]
    assert sum(map(len, parts)) == len(_whole())


def test_a_users_model_replaces_the_default_model_and_all_others() -> None:
    selected = select(Selection(level="full", custom_model=True))
    assert {case.scenario.model for case in selected} == {"custom"}
    assert {case.scenario.change(model="qwen3") for case in selected} == {
        case.scenario for case in _whole() if case.scenario.model == "qwen3"
    }
