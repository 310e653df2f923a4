"""The cases of frameworks: their ids, what selects them, and what their matrices say; no framework is imported."""

from __future__ import annotations

import ast

import pytest

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known.catalogue import read_catalogue
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.matrix.cases import make_any_case
from fsdp_doctor.matrix.frameworks.adapters import BUILT_IN
from fsdp_doctor.matrix.frameworks.framework_matrix import FrameworkMatrix, read_matrix
from fsdp_doctor.matrix.frameworks.framework_scenarios import (
    FrameworkCase,
    find_frameworks,
    list_scenarios,
    parse_framework_id,
)
from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.repro import Expectation, render_framework_script

_ALL = pytest.mark.parametrize("matrix", [read_matrix(name) for name in BUILT_IN], ids=lambda matrix: matrix.name)


@_ALL
def test_every_case_can_be_restored_from_its_id_and_from_a_report(matrix: FrameworkMatrix) -> None:
    cases = select(Selection(frameworks=(matrix.name,)))
    assert len({case.id for case in cases}) == len(cases)
    tried = set()
    for case in cases:
        assert isinstance(case, FrameworkCase)
        tried.add(case.scenario.configuration)
        assert parse_framework_id(case.id) == case
        scenario = {"framework": case.scenario.framework, "configuration": case.scenario.configuration}
        assert make_any_case(scenario, case.method) == case
    unused = set(matrix.configurations) - tried
    assert not unused, f"on_{matrix.name}.toml: no method applies in {', '.join(sorted(unused))}"


@_ALL
def test_a_configuration_is_written_as_its_id_is(matrix: FrameworkMatrix) -> None:
    for scenario in list_scenarios(matrix.name):
        assert "/".join(scenario.list_id_values()) == scenario.configuration
        # torchtitan trains a model of its own, which the plain model's weights cannot be held against.
        assert scenario.list_methods()[0].kind == "prepare" or matrix.name == "torchtitan"


@_ALL
def test_every_shim_is_listed_once(matrix: FrameworkMatrix) -> None:
    assert len({shim.name for shim in matrix.shims if shim.reason}) == len(matrix.shims)


@_ALL
def test_the_script_of_each_case_is_short_and_has_nothing_of_ours(matrix: FrameworkMatrix) -> None:
    for case in select(Selection(frameworks=(matrix.name,))):
        assert isinstance(case, FrameworkCase)
        expectation = Expectation(kind="crash", title="Well", source="a test")
        for as_test, most in ((True, 62), (False, 66)):
            lines = render_framework_script(case, expectation, as_test=as_test).splitlines()
            ast.parse("\n".join(lines))
            assert len(lines) <= most, case.id
            assert max(map(len, lines)) <= 120, case.id
            assert not [line for line in lines if "fsdp_doctor" in line]


@pytest.mark.parametrize("scenario", [{"framework": "accelerate", "configuration": "fsdp3/none"}, {"framework": "x"}])
def test_an_unknown_scenario_is_not_accepted_from_a_report(scenario: dict[str, str]) -> None:
    with pytest.raises((KeyError, TypeError)):
        make_any_case(scenario, "prepare")


@pytest.mark.parametrize(
    ("case_id", "sentence"),
    [
        ("accelerate:fsdp3/none/full/prepare", "'fsdp3' is not a value of accelerate"),
        ("accelerate:fsdp2/none/full/sharded/prepare", "names state_dict_type twice: full and sharded"),
        ("accelerate:fsdp2/none/prepare", "has no value for state_dict_type"),
        ("accelerate:fsdp2/none/full/load_stat", "has no method 'load_stat' (did you mean load_state"),
    ],
)
def test_an_invalid_id_is_refused_with_the_part_that_is_wrong(case_id: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        select(Selection(case_ids=(case_id,)))
    assert sentence in str(refused.value)


def test_a_framework_without_an_adapter_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="there is no framework 'acelerate' \\(did you mean accelerate"):
        find_frameworks(["acelerate"])


@pytest.mark.parametrize("option", [{"axes": {"offload": ("policy",)}}, {"level": "full"}])
def test_what_selects_in_the_matrix_is_refused_beside_a_framework(option: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="--framework has its own axes"):
        select(Selection(frameworks=("accelerate",), **option))  # type: ignore[arg-type]


def test_a_method_with_a_fix_is_listed_again_with_its_function_replaced() -> None:
    plain = select(Selection(frameworks=("verl",)))
    cases = select(Selection(frameworks=("verl",), fix=True))
    fixed = [case for case in cases if isinstance(case, FrameworkCase) and case.is_fixed]
    assert set(cases) == {*plain, *fixed}
    assert {case.plain_method for case in plain} == {case.plain_method for case in fixed}
    assert all(parse_framework_id(case.id) == case for case in fixed)
    assert set(select(Selection(case_ids=(plain[-1].id, fixed[0].id.removesuffix("+fix")), fix=True))) >= {fixed[0]}
    with pytest.raises(UsageError, match="--fix"):
        select(Selection(frameworks=("torchtitan",), fix=True))


def test_no_failure_is_expected_of_a_case_whose_function_is_replaced() -> None:
    context = RunContext(device="emulated", torch="2.13", packages={"verl": "0.7.1"})
    plain = parse_framework_id("verl:fsdp2/policy/get_per_tensor_param")
    fixed = plain.make_fixed()
    assert fixed is not None
    entries = [entry for entry in read_catalogue() if entry.is_expected_in(plain, context)]
    assert "FD001" in {entry.short_code for entry in entries}
    assert [entry for entry in read_catalogue() if entry.is_triggered_by(fixed, context)] == []


@_ALL
def test_the_quick_level_is_a_part_of_the_usual_one(matrix: FrameworkMatrix) -> None:
    quick, usual = (select(Selection(frameworks=(matrix.name,), level=level)) for level in ("quick", "default"))
    assert set(quick) <= set(usual)
    assert len(quick) < 50


def test_paths_and_words_of_ids_pick_among_a_frameworks_cases() -> None:
    selection = Selection(
        frameworks=("accelerate", "trainer"), methods=("load_state.fresh",), expression="lora and full"
    )
    assert {case.method for case in select(selection)} == {"load_state.fresh"}
    assert all("/lora/" in case.id and "/full/" in case.id for case in select(selection))
