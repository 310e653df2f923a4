"""Tests which cases the options mean."""

import itertools

import pytest

from fsdp_doctor.errors import CannotRun, UsageError
from fsdp_doctor.matrix.axes import AXES, AXIS, OFFLOADS, OffloadWay
from fsdp_doctor.matrix.cases import make_scenario
from fsdp_doctor.matrix.methods import FIX, FIXES, find_fix, find_method, list_methods
from fsdp_doctor.matrix.selection import Selection, select


def ids(**options):
    return [case.id for case in select(Selection(**options))]


def values(cases, axis):
    return {case.scenario.values[axis] for case in cases}


def is_plain(case):
    scenario = case.scenario
    axes = ("precision", "optimizer", "context", "consumer")
    ordinary = all(scenario.values[axis] == AXIS[axis].default for axis in axes)
    return ordinary and not scenario.model.has_experts


_FLAGS = [str(offload) for offload in OFFLOADS if offload.way is None]


@pytest.mark.parametrize("direction", ["out", "in"])
def test_the_default_matrix_tries_each_way_that_torch_can_build(direction):
    cases = [case for case in select(Selection(directions=(direction,))) if case.scenario.offload.way is not None]
    assert {case.scenario.offload.way for case in cases} == set(OffloadWay) - {
        OffloadWay.BY_PHASE,
        OffloadWay.BY_PARAMETER,
    }
    for scenario in {case.scenario for case in cases}:
        expected = {method.name for method in list_methods(scenario, direction) if not method.is_fix}
        assert {case.method for case in cases if case.scenario == scenario} == expected


def test_default_extractions_combine_both_strategies_with_all_offloads_stagings_and_methods():
    cases = [
        case
        for case in select(Selection(directions=("out",)))
        if is_plain(case) and not case.scenario.phase.raised and case.scenario.offload.way is None
    ]
    expected = {
        (strategy, offload, staging, method.name)
        for strategy in ("fsdp2", "fsdp1")
        for offload in _FLAGS
        for staging in AXIS["staging"].values
        for method in list_methods(make_scenario({"strategy": strategy, "offload": offload, "staging": staging}), "out")
        if not method.is_fix
    }
    pairs = [(c.scenario.strategy, str(c.scenario.offload), c.scenario.staging, c.method) for c in cases]
    assert set(pairs) == expected
    assert len(pairs) == len(expected)
    for axis in AXES:
        if not axis.always_in_id:
            assert values(cases, axis.name) == {axis.default}


def test_the_default_loading_matrix_adds_what_only_a_load_has():
    cases = [
        case
        for case in select(Selection(directions=("in",)))
        if is_plain(case) and not case.scenario.phase.raised and case.scenario.offload.way is None
    ]
    plain = {c for c in cases if c.scenario.init == "materialized" and c.scenario.checkpoint == "exact"}
    assert {c.scenario for c in plain} == {
        make_scenario({"strategy": strategy, "offload": offload, "staging": staging, "phase": "fresh"})
        for strategy in ("fsdp2", "fsdp1")
        for offload in _FLAGS
        for staging in AXIS["staging"].values
    }
    for scenario in {c.scenario for c in plain}:
        expected = {method.name for method in list_methods(scenario, "in") if not method.is_fix}
        assert {c.method for c in plain if c.scenario == scenario} == expected
    others = set(cases) - plain
    assert values(others, "init") == {"materialized", "meta"}
    assert values(others, "checkpoint") == set(AXIS["checkpoint"].values) - {"hub"}


def test_the_default_matrix_tries_every_method_after_a_step_that_raised():
    for direction in ("out", "in"):
        cases = [case for case in select(Selection(directions=(direction,))) if case.scenario.phase.raised]
        for strategy, phase in itertools.product(("fsdp2", "fsdp1"), ("after-raised-forward", "after-raised-backward")):
            values = {"strategy": strategy, "offload": "none", "staging": "unstaged", "phase": phase}
            scenario = make_scenario(values)
            expected = {method.name for method in list_methods(scenario, direction) if not method.is_fix}
            assert {case.method for case in cases if case.scenario == scenario} == expected
        assert len({case.scenario for case in cases}) == 4


def test_the_default_matrix_samples_full_precision_inference_mode_and_experts():
    sampled = [case for case in select(Selection()) if not is_plain(case) and case.scenario.optimizer == "adamw"]
    assert values(sampled, "precision") == set(AXIS["precision"].values)
    assert values(sampled, "context") == {"ordinary", "inference"}
    assert values([case for case in sampled if case.scenario.model.has_experts], "checkpoint") == {"exact", "hub"}
    directions = {
        (case.scenario.version, find_method(case.method, case.scenario.version).direction) for case in sampled
    }
    assert directions == set(itertools.product((1, 2), ("out", "in")))
    assert all(find_method(case.method, case.scenario.version).used_by for case in sampled)


def test_the_default_matrix_tries_muon_and_8_bit_with_optimizer_methods():
    cases = [case for case in select(Selection()) if case.scenario.optimizer != "adamw"]
    assert values(cases, "optimizer") == {"muon", "adamw-8bit"}
    for scenario in {case.scenario for case in cases}:
        direction = "out" if scenario.phase.is_trained else "in"
        methods = {method.name for method in list_methods(scenario, direction) if not method.is_fix}
        assert {case.method for case in cases if case.scenario == scenario} == methods
        assert all("optim" in name for name in methods if name != "rank_files.model+optimizer")


def test_another_optimizer_has_only_methods_that_concern_its_state():
    for value in AXIS["optimizer"].values:
        scenario = make_scenario({"strategy": "fsdp2", "offload": "none", "staging": "unstaged", "optimizer": value})
        names = {method.name for method in list_methods(scenario)}
        assert {FIX, "load_full_tensors", "save_optimizer_state", "load_optimizer_state"} <= names
        assert ("state_dict" in names) == (value == AXIS["optimizer"].default)


def test_requested_values_get_every_method_and_no_other_precision_or_context():
    asked = {"strategy": ("fsdp1",), "offload": ("policy",), "staging": ("staged",)}
    assert all(map(is_plain, select(Selection(axes=asked))))
    cases = select(Selection(axes={**asked, "precision": ("fp32-compute",)}, directions=("in",)))
    (scenario,) = {case.scenario for case in cases}
    assert {case.method for case in cases} == {
        method.name for method in list_methods(scenario, "in") if not method.is_fix
    }


def test_the_directions_together_are_the_default_matrix():
    out, into = select(Selection(directions=("out",))), select(Selection(directions=("in",)))
    assert not set(out) & set(into)
    assert set(select(Selection())) == {*out, *into}
    assert {find_method(c.method, c.scenario.version).direction for c in into} == {"in"}


def test_an_extracting_method_has_no_scenario_that_only_loads_have():
    only_loading = [
        c for c in select(Selection(level="full")) if c.scenario.init == "meta" or c.scenario.checkpoint != "exact"
    ]
    assert {find_method(c.method, c.scenario.version).direction for c in only_loading} == {"in"}


def test_full_has_every_value_of_every_axis_but_the_custom_model():
    cases = select(Selection(level="full"))
    for axis in AXES:
        assert values(cases, axis.name) == set(axis.values) - {"custom"}


def test_adapter_methods_are_selected_only_for_models_with_adapters():
    cases = select(Selection(level="full"))
    assert {case.scenario.model for case in cases if case.method.startswith("lora.")} == {
        "qwen3-lora",
        "qwen3-qlora",
        "qwen3-qlora-bf16",
    }


def test_a_state_dict_is_held_only_across_offloads_of_device_shards():
    held = [case.scenario for case in select(Selection()) if case.method == "state_dict.held"]
    assert {(s.strategy, str(s.offload), s.staging) for s in held} == {
        ("fsdp2", "param", "staged"),
        ("fsdp2", "param+optimizer", "staged"),
    }


def test_full_contains_the_default_matrix():
    assert set(ids()) < set(ids(level="full"))


ASKED = (
    {"strategy": ("fsdp1-orig",)},
    {"offload": ("policy", "none")},
    {"phase": ("fresh",)},
    {"backend": ("device-only",)},
    {"model": ("qwen2", "qwen3-moe")},
    {"strategy": ("fsdp2",), "dims": ("uneven",), "transfer": ("nonblocking",)},
    {"sharding": ("hsdp", "full")},
)


@pytest.mark.parametrize("level", ["default", "full"])
def test_a_selected_case_has_no_value_that_was_not_asked_for(level):
    for asked in ASKED:
        cases = select(Selection(axes=asked, level=level))
        for axis, wanted in asked.items():
            assert values(cases, axis) == set(wanted)


def test_a_custom_model_replaces_all_models_or_joins_the_named_models():
    for level in ("default", "full"):
        assert values(select(Selection(custom_model=True, level=level)), "model") == {"custom"}
    cases = select(Selection(custom_model=True, axes={"model": ("qwen2", "custom")}))
    assert values(cases, "model") == {"qwen2", "custom"}


def test_no_case_is_selected_twice():
    for options in ({"level": "full", "fix": True}, {"level": "full", "methods": ("mod:fn",)}):
        selected = ids(**options)
        assert len(selected) == len(set(selected))
    assert ids(case_ids=("fsdp2/none/staged/dcp", "fsdp2/none/staged/even/dcp")) == ["fsdp2/none/staged/dcp"]


def test_cases_of_one_scenario_and_scenarios_of_one_backend_run_together():
    mixed = [f"fsdp2/none/staged/{rest}" for rest in ("device-only/dcp", "dcp", "device-only/unshard", "unshard")]
    for selection in (
        Selection(level="full", fix=True),
        Selection(case_ids=(*mixed[:2], "fsdp2/policy/staged/dcp", *mixed[2:])),
    ):
        scenarios = [scenario for scenario, _ in itertools.groupby(case.scenario for case in select(selection))]
        assert len(scenarios) == len(set(scenarios))
        backends = [backend for backend, _ in itertools.groupby(scenario.backend for scenario in scenarios)]
        assert backends == ["mixed", "device-only"]


def test_cases_by_id_run_in_the_order_in_which_they_are_given():
    asked = ("fsdp2/policy/staged/unshard", "fsdp1/none/staged/state_dict", "fsdp1/none/staged/full_state_dict")
    assert ids(case_ids=asked) == list(asked)


def test_fix_adds_the_fix_once_to_each_scenario():
    without, with_fix = select(Selection()), select(Selection(fix=True))
    added = [case for case in with_fix if case.method in FIXES]
    assert [case for case in with_fix if case.method not in FIXES] == without
    assert len(added) == len(set(added))
    assert {case.scenario for case in added} == {case.scenario for case in without}
    fixes = {(c.scenario, find_fix(c.method, c.scenario.version)) for c in without}
    directions = {(scenario, find_method(name, scenario.version).direction) for scenario, name in fixes}
    all_of_ours = {(s, m.name) for s, direction in directions for m in list_methods(s, direction) if m.is_fix}
    assert fixes <= all_of_ours == {(c.scenario, c.method) for c in added}


def test_fix_joins_cases_given_by_id():
    found = ids(case_ids=("fsdp2/none/staged/dcp", "fsdp2/none/staged/unshard"), fix=True)
    fixes = (FIX, "local_shards", "save_full_tensors", "save_optimizer_state")
    assert found == [f"fsdp2/none/staged/{name}" for name in ("dcp", "unshard", *fixes)]


def test_the_fix_can_be_named_as_a_method():
    assert {case.method for case in select(Selection(methods=(FIX,)))} == {FIX}


def test_fix_stays_beside_what_an_expression_leaves_and_nowhere_else():
    expression = "fsdp2 and policy+param and staged and not optimizer and dcp and not load"
    found = ids(expression=expression, fix=True)
    ours = (FIX, "local_shards", "save_full_tensors", "save_optimizer_state")
    assert found == [f"fsdp2/policy+param/staged/{name}" for name in ("dcp", *ours)]


def test_an_expression_leaves_exactly_the_ids_it_matches():
    found = ids(expression="staged and (dcp or unshard) and not policy", directions=("out",))
    expected = [
        i
        for i in ids(directions=("out",))
        if "/staged/" in i and i.endswith(("/dcp", "/unshard")) and "policy" not in i
    ]
    assert found == expected
    assert found


def test_an_expression_also_applies_to_cases_given_by_id():
    asked = ("fsdp2/none/staged/dcp", "fsdp2/none/unstaged/dcp")
    assert ids(case_ids=asked, expression="unstaged") == ["fsdp2/none/unstaged/dcp"]


def test_named_methods_are_the_only_ones():
    cases = select(Selection(methods=("dcp", "full_state_dict")))
    assert {(case.scenario.strategy, case.method) for case in cases} == {("fsdp2", "dcp"), ("fsdp1", "full_state_dict")}


def test_a_method_of_the_user_joins_the_table():
    extra = set(select(Selection(methods=("mod:fn",)))) - set(select(Selection()))
    assert {case.method for case in extra} == {"mod:fn"}
    assert {case.scenario for case in extra} == {case.scenario for case in select(Selection(directions=("out",)))}


def test_a_loader_of_the_user_joins_the_loading_scenarios():
    selection = Selection(methods=("mod:fn",), directions=("in",))
    extra = {case for case in select(selection) if case.method == "mod:fn"}
    assert {case.scenario for case in extra} == {case.scenario for case in select(Selection(directions=("in",)))}


def test_words_that_match_no_case_are_named() -> None:
    with pytest.raises(CannotRun, match=r"has 'zebra' or 'gnu'; `fsdp-doctor list --axes` and .*--methods`"):
        select(Selection(expression="fsdp2 and (zebra or gnu) and not zebra"))
    with pytest.raises(CannotRun, match="no case is selected; "):
        select(Selection(expression="fsdp1 and fsdp2"))


@pytest.mark.parametrize(
    "options",
    [
        {"expression": "zebra"},
        {"expression": "zebra", "fix": True},
        {"methods": ("full_state_dict",), "axes": {"strategy": ("fsdp2",)}},
    ],
)
def test_a_selection_of_nothing_cannot_run(options):
    with pytest.raises(CannotRun, match="no case is selected"):
        select(Selection(**options))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"methods": ("zebra",)}, "there is no method 'zebra'"),
        ({"axes": {"offload": ("zebra",)}}, "--offload: unknown value 'zebra'"),
        ({"axes": {"offload": ("none", "zebra")}, "level": "full"}, "--offload: unknown value 'zebra'"),
        ({"case_ids": ("zebra/dcp",)}, "'zebra' is not a value of any axis"),
        ({"expression": "dcp dcp"}, "is not expected here"),
    ],
)
def test_what_selects_nothing_or_does_not_exist_is_a_usage_error(options, complaint):
    with pytest.raises(UsageError) as caught:
        select(Selection(**options))
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "case_id", ["fsdp2/none/staged/full_state_dict", "fsdp1/none/staged/unshard", "fsdp1-orig/none/staged/dcp"]
)
def test_an_id_whose_strategy_lacks_its_method_is_a_usage_error(case_id):
    with pytest.raises(UsageError):
        select(Selection(case_ids=(case_id,)))


def test_a_named_method_of_one_direction_brings_no_fix_of_the_other():
    cases = select(Selection(methods=("unshard",), fix=True))
    assert {case.method for case in cases} == {
        "unshard",
        FIX,
        "local_shards",
        "save_full_tensors",
        "save_optimizer_state",
    }
