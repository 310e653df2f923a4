"""The training step after an extraction is compared with that of a run without the extraction."""

from __future__ import annotations

import pathlib

import pytest
from program import Run, probe, user_methods

_ENDS_OTHERWISE = "the next training step ends otherwise than that of a run without the extraction"
_PARTS = "parts of the training state"
_SETTINGS = "the extraction changed settings of the process: "
_FAULTS = {
    # Nothing but the step itself shows these.
    "doubles_an_accumulated_gradient": _ENDS_OTHERWISE,
    "scales_before_the_optimizer_steps": _ENDS_OTHERWISE,
    "scales_after_the_optimizer_has_stepped": _ENDS_OTHERWISE,
    "scales_before_every_optimizer_steps": _ENDS_OTHERWISE,
    "scales_what_every_linear_layer_returns": _ENDS_OTHERWISE,
    "scales_what_every_linear_layer_is_given": _ENDS_OTHERWISE,
    "scales_every_gradient_of_a_linear_layer": _ENDS_OTHERWISE,
    "replaces_a_function_of_torch": _ENDS_OTHERWISE,
    "replaces_the_attention_of_torch": _ENDS_OTHERWISE,
    "replaces_the_linear_function": _ENDS_OTHERWISE,
    "replaces_the_forward_of_a_class": _ENDS_OTHERWISE,
    "replaces_the_step_of_a_class": _ENDS_OTHERWISE,
    "leaves_a_dispatch_mode_on": _ENDS_OTHERWISE,
    "changes_an_epsilon": _ENDS_OTHERWISE,
    "changes_a_scaling": _ENDS_OTHERWISE,
    "sets_a_dropout": _ENDS_OTHERWISE,
    "changes_an_activation": _ENDS_OTHERWISE,
    "leaves_the_layers_unsharded_after_the_forward": f"{_ENDS_OTHERWISE}: what is unsharded between forward",
    "leaves_one_layer_unsharded_after_the_forward": f"{_ENDS_OTHERWISE}: what is unsharded between forward",
    "leaves_the_layers_unsharded_after_the_backward": f"{_ENDS_OTHERWISE}: what is unsharded after the backward",
    # These have a name.
    "scales_what_a_layer_returns": f"{_PARTS}: hooks and forwards",
    "exchanges_two_layers": _PARTS,
    "takes_a_layer_away": _PARTS,
    "leaves_one_layer_in_eval_mode": f"{_PARTS}: training mode",
    "leaves_a_policy_of_float32": "",
    "leaves_a_policy_of_bfloat16_reductions": f"{_PARTS}: mixed precision",
    "leaves_gradients_unsynchronized": f"{_PARTS}: reduction of the gradients",
    "halves_the_moments": _PARTS,
    "counts_the_steps_anew": _PARTS,
    "drops_the_state_of_the_optimizer": _PARTS,
    "changes_the_learning_rate": f"{_PARTS}: options of the optimizer",
    "maximizes": f"{_PARTS}: options of the optimizer",
    "takes_a_parameter_from_the_optimizer": _PARTS,
    "freezes_a_layer": _PARTS,
    "leaves_gradients": _PARTS,
    "leaves_gradients_off": "",
    "leaves_inference_mode_on": "",
    "leaves_another_default_dtype": f"{_SETTINGS}the default dtype",
    "leaves_autocast_on": f"{_SETTINGS}autocast",
    "draws_random_numbers": f"{_SETTINGS}torch's random numbers",
    "draws_random_numbers_of_the_device": f"{_SETTINGS}the device's random numbers",
    "seeds_the_generators": f"{_SETTINGS}torch's random numbers, the device's random numbers",
}
_RIGHT = (
    "honest",
    "removes_its_hooks",
    "puts_functions_back",
    "puts_attributes_back",
    "goes_back_to_training",
    "puts_the_policy_back",
    "puts_the_settings_of_fsdp_back",
    "goes_on_in_contexts",
    "puts_the_process_back",
    "draws_from_a_generator_of_its_own",
    "freezes_and_thaws",
    "puts_the_learning_rate_back",
    "clears_its_gradients",
    "counts_its_calls_on_the_model",
    "agrees_with_the_other_ranks",
)
_EVERYWHERE = ("scales_before_every_optimizer_steps", "replaces_the_linear_function", "changes_an_epsilon", "honest")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    scenario = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--method", "state_dict")
    methods = user_methods(*(f"next_step:{name}" for name in (*_FAULTS, *_RIGHT)))
    return probe(tmp_path_factory.mktemp("planted"), *scenario, *methods, device="emulated")


@pytest.mark.parametrize("name", _FAULTS)
def test_an_extraction_after_which_training_goes_on_otherwise_is_poisoned(planted: Run, name: str) -> None:
    verdict = planted.result(f":{name}").verdict
    assert (verdict.kind, _FAULTS[name] in verdict.reason) == ("poisoned", True), verdict


@pytest.mark.parametrize("name", _RIGHT)
def test_an_extraction_that_puts_back_what_it_changed_is_ok(planted: Run, name: str) -> None:
    verdict = planted.result(f":{name}").verdict
    assert verdict.kind == "ok", verdict


def test_nothing_left_behind_reaches_the_next_case(planted: Run) -> None:
    assert planted.kind("/state_dict") == "ok"
    assert planted.code == 1, planted.stderr
    assert planted.left == []


def test_the_next_step_is_compared_in_every_kind_of_scenario(tmp_path: pathlib.Path) -> None:
    scenarios = (
        "--strategy",
        "fsdp2,fsdp1,fsdp1-orig",
        "--offload",
        "none,policy+optimizer",
        "--phase",
        "trained,fresh",
    )
    methods = user_methods(*(f"next_step:{name}" for name in _EVERYWHERE))
    run = probe(tmp_path, *scenarios, *methods, "-k", "next_step and not staged", device="emulated")
    assert run.report is not None, run.stderr
    found = {result.id: result.verdict.kind for result in run.report.results}
    assert found == {case: "ok" if case.endswith("honest") else "poisoned" for case in found}


def test_a_hook_of_a_gradient_counts_where_fsdp_calls_it(tmp_path: pathlib.Path) -> None:
    """FSDP2 writes the gradient of a shard without autograd, so a hook of the shard never runs."""
    scenarios = ("--strategy", "fsdp2,fsdp1", "--offload", "none", "--staging", "unstaged")
    run = probe(
        tmp_path, *scenarios, *user_methods("next_step:doubles_a_gradient"), "-k", "next_step", device="emulated"
    )
    assert run.kind("fsdp2/none/unstaged/faults.next_step:doubles_a_gradient") == "ok"
    assert run.kind("fsdp1/none/unstaged/faults.next_step:doubles_a_gradient") == "poisoned"
