"""Axes, scenarios, the ids of cases, and the table of methods."""

import dataclasses
import itertools

import pytest

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.axes import AXES, AXIS, OffloadWay, check_axis_value
from fsdp_doctor.matrix.cases import Case, Scenario, make_scenario, parse_case_id
from fsdp_doctor.matrix.contracts import Contract, promises
from fsdp_doctor.matrix.methods import METHOD_NAMES, METHODS, find_method, is_user_method
from fsdp_doctor.matrix.selection import Selection, select

BASE = {"strategy": "fsdp2", "offload": "none", "staging": "staged"}


def test_every_case_of_the_full_matrix_is_read_back_from_its_id():
    for case in select(Selection(level="full", fix=True, methods=(*METHOD_NAMES, "my.module:function"))):
        assert parse_case_id(case.id, METHOD_NAMES) == case


def test_no_two_cases_of_the_full_matrix_share_an_id():
    cases = select(Selection(level="full", fix=True))
    assert len({case.id for case in cases}) == len(cases)


def test_no_word_means_two_things_in_an_id():
    words = [value for axis in AXES for value in axis.values] + list(METHOD_NAMES)
    assert sorted(words) == sorted(set(words))
    assert not [word for word in words if "/" in word or word != word.strip() or not word]


def test_a_scenario_has_a_field_for_each_axis_in_the_same_order():
    assert [field.name for field in dataclasses.fields(Scenario)] == [axis.name for axis in AXES]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "fsdp2/none/staged"),
        ({"offload": "policy+param"}, "fsdp2/policy+param/staged"),
        ({"dims": "even", "phase": "trained", "backend": "mixed"}, "fsdp2/none/staged"),
        ({"dims": "uneven"}, "fsdp2/none/staged/uneven"),
        ({"transfer": "nonblocking", "model": "qwen2"}, "fsdp2/none/staged/qwen2/nonblocking"),
        ({"strategy": "fsdp1-orig", "sharding": "hsdp", "phase": "fresh"}, "fsdp1-orig/none/staged/fresh/hsdp"),
    ],
)
def test_an_id_holds_three_axes_and_all_values_other_than_defaults(fields, expected):
    assert make_scenario(BASE | fields).id == expected


def test_the_values_of_an_id_are_understood_in_any_order():
    expected = make_scenario({"strategy": "fsdp2", "offload": "policy", "staging": "staged", "dims": "uneven"})
    for order in itertools.permutations(("fsdp2", "policy", "staged", "uneven")):
        assert parse_case_id("/".join([*order, "dcp"]), METHOD_NAMES) == Case(expected, "dcp")


def test_a_default_spelled_out_in_an_id_makes_no_other_case():
    assert parse_case_id("fsdp2/none/staged/even/dcp", METHOD_NAMES) == parse_case_id(
        "fsdp2/none/staged/dcp", METHOD_NAMES
    )


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("", ["has no value for strategy and offload and staging"]),
        ("dcp", ["has no value for strategy and offload and staging", "fsdp2/policy/staged/state_dict"]),
        ("fsdp2/staged/dcp", ["has no value for offload;"]),
        ("fsdp2/none/staged", ["has no value for staging"]),
        ("fsdp3/none/staged/dcp", ["'fsdp3' is not a value of any axis", "fsdp2"]),
        ("fsdp2/none/staged/zebra/dcp", ["'zebra' is not a value of any axis"]),
        ("fsdp2//staged/dcp", ["'' is not a value of any axis"]),
        ("fsdp2/none/policy/staged/dcp", ["names the axis offload twice", "none and policy"]),
        ("fsdp2/fsdp2/none/staged/dcp", ["names the axis strategy twice"]),
        ("fsdp2/none/staged/state_dic", ["there is no method 'state_dic'", "did you mean ", "state_dict"]),
        ("fsdp2/none/staged/", ["there is no method ''"]),
        ("fsdp2/none/staged/dcp ", ["there is no method 'dcp '"]),
    ],
)
def test_an_invalid_id_is_a_usage_error_that_names_the_wrong_part(text, complaints):
    with pytest.raises(UsageError) as caught:
        parse_case_id(text, METHOD_NAMES)
    assert repr(text) in str(caught.value)
    for complaint in complaints:
        assert complaint in str(caught.value)


def test_an_id_may_end_in_a_function_of_the_user():
    assert parse_case_id("fsdp1/none/staged/pkg.mod:extract", METHOD_NAMES).method == "pkg.mod:extract"


@pytest.mark.parametrize(
    ("offload", "policy", "param", "optimizer"),
    [
        ("none", False, False, False),
        ("param", False, True, False),
        ("optimizer", False, False, True),
        ("param+optimizer", False, True, True),
        ("policy", True, False, False),
        ("policy+param", True, False, False),
        ("policy+optimizer", True, False, False),
        ("policy+param+optimizer", True, False, False),
    ],
)
def test_the_policy_turns_the_manual_offloads_off(offload, policy, param, optimizer):
    scenario = make_scenario(BASE | {"offload": offload})
    assert (scenario.policy, scenario.param_offload, scenario.optimizer_offload) == (policy, param, optimizer)


@pytest.mark.parametrize("way", OffloadWay)
def test_a_way_that_verl_lacks_stands_alone_and_sorts(way):
    scenario = make_scenario(BASE | {"offload": str(way)})
    assert (scenario.offload.way, scenario.offload.flags, scenario.policy) == (way, (), False)
    assert sorted([scenario, make_scenario(BASE | {"offload": "none"})])[1] == scenario
    for joined in (f"{way}+param", f"policy+{way}"):
        with pytest.raises(UsageError):
            check_axis_value("offload", joined)


@pytest.mark.parametrize("way", ["moved", "by-phase", "by-parameter"])
def test_ways_that_replace_fsdp2_shards_are_no_ways_of_fsdp1(way):
    assert make_scenario(BASE | {"strategy": "fsdp1", "offload": way}).contradiction


@pytest.mark.parametrize(("strategy", "version"), [("fsdp2", 2), ("fsdp1", 1), ("fsdp1-orig", 1)])
def test_both_kinds_of_fsdp1_are_version_1(strategy, version):
    assert make_scenario(BASE | {"strategy": strategy}).version == version


def test_a_scenario_comes_back_from_its_dict():
    scenario = make_scenario({axis.name: list(axis.values)[-1] for axis in AXES})
    assert make_scenario(scenario.to_json()) == scenario


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_an_axis_takes_its_own_values_and_no_others(axis):
    assert [check_axis_value(axis.name, value) for value in axis.values] == list(axis.values)
    with pytest.raises(UsageError) as caught:
        check_axis_value(axis.name, "zebra")
    assert f"--{axis.name}: unknown value 'zebra'" in str(caught.value)
    assert f"--{axis.name}" in str(caught.value)
    assert all(value in str(caught.value) for value in axis.values)


@pytest.mark.parametrize("fsdp", [1, 2])
def test_a_method_name_is_one_row_in_each_version(fsdp):
    rows = [method for method in METHODS if fsdp in method.fsdp]
    names = [method.name for method in rows]
    assert sorted(names) == sorted(set(names))
    assert [find_method(name, fsdp) for name in names] == rows


def test_every_row_of_the_table_applies_somewhere():
    assert {case.method for case in select(Selection(level="full", fix=True))} == set(METHOD_NAMES)
    assert all(method.fsdp and set(method.fsdp) <= {1, 2} for method in METHODS)


def test_a_row_restricted_to_values_of_an_axis_names_existing_values():
    for method in METHODS:
        for axis, values in method.only.items():
            assert set(values) <= set(AXIS[axis].values)


def test_no_method_of_the_table_is_taken_for_one_of_the_user():
    assert not [name for name in METHOD_NAMES if is_user_method(name)]


@pytest.mark.parametrize("fsdp", [1, 2])
def test_a_user_method_has_the_default_contract_in_both_fsdp_versions(fsdp):
    assert find_method("mod:fn", fsdp).contract == Contract()


def test_promises_declares_the_contract_and_returns_the_function_itself():
    def extract(model):
        return model

    marked = promises(device="cpu", dtype="any", ranks="rank0", keys="parameters")(extract)
    assert marked is extract
    assert marked.contract == Contract(form="full", device="cpu", dtype="any", ranks="rank0", keys="parameters")


@pytest.mark.parametrize(
    ("word", "known"),
    [
        ({"device": "cuda"}, "compute, cpu, parameter, any"),
        ({"dtype": "bf16"}, "master, compute, any"),
        ({"ranks": "0"}, "all, rank0"),
        ({"keys": "names"}, "state_dict, parameters"),
    ],
)
def test_promises_refuses_a_word_that_a_contract_does_not_have(word, known):
    with pytest.raises(ValueError, match=known):
        promises(**word)
