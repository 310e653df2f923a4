"""The levels: each is a part of the next."""

from __future__ import annotations

import pytest

from fsdp_doctor.cli.selection import SelectionOptions
from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.extent import Level
from fsdp_doctor.matrix.selection import Selection, select


def _ids(level: Level) -> set[str]:
    return {case.id for case in select(Selection(level=level))}


def test_each_level_is_a_part_of_the_next() -> None:
    assert _ids("quick") < _ids("default") < _ids("full")


def test_quick_has_both_strategies_both_directions_and_the_two_commonest_failures() -> None:
    ids = _ids("quick")
    assert {"fsdp2/policy/staged/state_dict", "fsdp1/param/unstaged/full_state_dict.rank0+cpu"} <= ids
    assert any(name.endswith("fresh/meta/to_empty.broadcast") for name in ids)


def test_a_filter_beside_quick_leaves_cases_out_and_adds_none() -> None:
    only = select(Selection(level="quick", axes={"strategy": ("fsdp1",)}))
    assert {case.id for case in only} < _ids("quick")
    assert {case.scenario.strategy for case in only} == {"fsdp1"}
    with pytest.raises(CannotRun, match="no case is selected"):
        select(Selection(level="quick", axes={"dims": ("uneven",)}))


def test_a_method_that_is_named_is_tried_in_the_scenarios_of_quick() -> None:
    cases: list[Case] = select(Selection(level="quick", methods=("dcp", "my.module:function")))
    assert {case.method for case in cases} == {"dcp", "my.module:function"}
    assert {case.scenario.id for case in cases} == {"fsdp2/policy/staged", "fsdp1/param/unstaged"}


def test_full_is_the_level_full_and_contradicts_another() -> None:
    assert SelectionOptions(full=True).select() == SelectionOptions(level="full").select()
    with pytest.raises(UsageError, match="cannot be combined with --level quick"):
        SelectionOptions(full=True, level="quick").select()
    with pytest.raises(UsageError, match="--level quick"):
        SelectionOptions(level="quick", case=["fsdp2/none/unstaged/dcp"]).select()
