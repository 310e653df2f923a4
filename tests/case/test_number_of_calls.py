"""Tests what a probe calls twice, and that all ranks agree on it: one that called alone would wait for the others."""

from __future__ import annotations

import pathlib
import tempfile

from support.ranks import Setting, on_ranks, this_device, this_rank, world_size

from fsdp_doctor.case import runtime
from fsdp_doctor.case.case_runner import CaseRunner
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.matrix.cases import parse_case_id
from fsdp_doctor.matrix.methods import METHOD_NAMES
from fsdp_doctor.verdict.records import Record

_TWO_RANKS = on_ranks(Setting("cpu", 2))
_SCENARIO = "fsdp2/param/unstaged"


def _calls(case_id: str, *, with_ledgers: bool = False) -> int:
    method = case_id.rpartition("/")[2]
    told: list[Record] = []
    place = Place(rank=this_rank(), world_size=world_size(), local_rank=this_rank(), num_nodes=1)
    with tempfile.TemporaryDirectory() as scratch:
        here = runtime.make_for_present_group(place, this_device(), pathlib.Path(scratch))
        here.with_ledgers = with_ledgers
        runner = CaseRunner(here, (method,) if ":" in method else (), report=told.append)
        record = runner.examine(parse_case_id(case_id, METHOD_NAMES))
    assert record.done
    assert told[-1] == record
    return max(record.call for record in told)


@_TWO_RANKS
def test_a_user_function_is_called_twice_and_a_matrix_method_once() -> None:
    assert _calls(f"{_SCENARIO}/faults.values:honest") == 2
    assert _calls(f"{_SCENARIO}/state_dict") == 1


@_TWO_RANKS
def test_a_function_that_only_keeps_memory_is_called_twice() -> None:
    assert _calls(f"{_SCENARIO}/faults.values:keeps_memory") == 2


@_TWO_RANKS
def test_before_the_first_step_there_is_no_second_call() -> None:
    assert _calls("fsdp2/param/unstaged/fresh/faults.values:honest") == 1


@_TWO_RANKS
def test_what_is_found_on_one_rank_keeps_all_from_a_second_call() -> None:
    assert _calls(f"{_SCENARIO}/faults.values:flips_one_bit") == 1
    assert _calls(f"{_SCENARIO}/faults.values:changes_a_weight_on_rank_1") == 1


@_TWO_RANKS
def test_leftovers_on_one_rank_prevent_the_second_call_on_all_ranks() -> None:
    assert _calls(f"{_SCENARIO}/faults.side_effects:thread_on_rank_1") == 1


@_TWO_RANKS
def test_a_loader_of_the_users_is_called_once() -> None:
    assert _calls(f"{_SCENARIO}/faults.loaders:honest") == 1


@on_ranks(Setting("emulated", 2))
def test_a_life_whose_stages_are_measured_has_one_call() -> None:
    assert _calls(f"{_SCENARIO}/faults.values:honest", with_ledgers=True) == 1
