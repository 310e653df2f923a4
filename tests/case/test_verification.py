"""Each comparison that verification makes, tested with a fault that only it can find."""

from __future__ import annotations

import pathlib

import pytest
from program import Run, probe, user_paths

_ONE_SCENARIO = ("--strategy", "fsdp2", "--offload", "param", "--staging", "unstaged", "--path", "state_dict")
_FAULTS: dict[str, tuple[str, str]] = {
    "honest": ("ok", ""),
    "drops_a_key": ("incomplete", "missing of 25 names: model.norm.weight"),
    "invents_a_key": ("incomplete", "not a name of the model: model.surprise.weight"),
    "yields_a_key_twice": ("wrong", "came twice: model.norm.weight"),
    "swaps_two_tensors": ("wrong", "elements differ"),
    "flips_one_bit": ("wrong", "rank 1: 1 of 4096 elements differ, the first at 7"),
    "changes_a_shape": ("wrong", "shape (64, 256), not (256, 64): lm_head.weight"),
    "returns_bfloat16": ("misplaced", "dtype bfloat16 where float32 was promised"),
    "returns_bfloat16_and_says_so": ("ok", ""),
    "returns_data_on_rank_0_only": ("incomplete", "rank 1: no data on this rank"),
    "returns_data_on_rank_0_only_and_says_so": ("ok", ""),
    "yields_shards": ("wrong", "dtensor where a full tensor was promised"),
    "flushes_what_is_subnormal": ("wrong", "elements differ"),
    "loses_the_sign_of_zero": ("wrong", "0.0, not -0.0: "),
    "replaces_nan": ("wrong", "0.0, not nan: model.embed_tokens.weight"),
    "replaces_infinity": ("wrong", "not inf: model.embed_tokens.weight"),
    "keeps_memory": ("leak", "still referenced"),
    "changes_a_weight": ("poisoned", "the extraction changed 1 of"),
    "changes_weights_when_the_model_is_loaded": ("poisoned", "the next training step would start from other weights"),
    "leaves_eval_mode": ("poisoned", "parts of the training state: training mode"),
    "freezes_a_parameter": ("poisoned", "the extraction changed 1 of"),
    "replaces_a_parameter": ("poisoned", "parts of the training state: model.norm.weight"),
    "leaves_a_hook": ("poisoned", "parts of the training state: hooks and forwards"),
    "leaves_no_hook": ("ok", ""),
    "leaves_the_number_of_ranks_as_divisor": ("ok", ""),
    "leaves_a_layer_unsynchronized": ("poisoned", "parts of the training state: reduction of the gradients"),
    "leaves_it_synchronized": ("ok", ""),
    "leaves_backwards_that_do_not_end": ("poisoned", "parts of the training state: reduction of the gradients"),
    "leaves_a_layer_unsharded": ("leak", "left unsharded: model.layers.1."),
    "leaves_a_layer_sharded_again": ("ok", ""),
    "wraps_a_forward": ("poisoned", "parts of the training state: hooks and forwards"),
    "changes_a_buffer_of_no_state_dict": ("poisoned", "parts of the training state: model.rotary_emb.inv_freq"),
    "changes_an_option_of_the_optimizer": ("poisoned", "parts of the training state: options of the optimizer"),
    "has_the_optimizer_do_nothing": ("poisoned", "the next training step changes no weight"),
    "never_ends": ("wrong", "goes on after 51 entries, where 25 were promised"),
    "yields_what_has_no_data": ("misplaced", "on meta where"),
    "raises_with_the_words_of_a_full_memory": ("crash", "TypeError: the policy"),
    "yields_names_that_are_none": ("crash", "with a str for a name, not list"),
    "breaks_the_next_step": ("poisoned", "RuntimeError: planted in the next training step"),
    "raises_everywhere": ("crash", "KeyError: 'planted on every rank'"),
    "raises_out_of_memory": ("oom", "can't allocate memory"),
    "returns_a_number": ("crash", "a path returns a mapping or yields (name, tensor), not int"),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    paths = user_paths(*(f"values:{name}" for name in _FAULTS))
    return probe(tmp_path_factory.mktemp("planted"), *_ONE_SCENARIO, *paths)


@pytest.mark.parametrize("fault", list(_FAULTS))
def test_a_planted_fault_is_found_for_what_it_is(planted: Run, fault: str) -> None:
    kind, reason = _FAULTS[fault]
    verdict = planted.result(f":{fault}").verdict
    assert verdict.kind == kind, verdict
    assert reason in verdict.reason


def test_what_is_yielded_on_the_host_must_have_arrived(tmp_path: pathlib.Path) -> None:
    """The doctor waits for the device before it looks at what lies there, and not before it looks at the host."""
    names = ("yields_what_is_in_flight", "returns_what_is_in_flight", "returns_what_has_arrived")
    paths = user_paths(*(f"values:{name}" for name in names))
    run = probe(tmp_path, *_ONE_SCENARIO, *paths, device="emulated")
    assert {name: run.kind(f":{name}") for name in names} == dict(zip(names, ("wrong", "wrong", "ok"), strict=True))


def test_a_divisor_of_the_gradients_that_was_left_behind_is_found(tmp_path: pathlib.Path) -> None:
    """gloo has no such reduction, and fails in the next step; on a device nothing raises."""
    run = probe(tmp_path, *_ONE_SCENARIO, *user_paths("values:leaves_another_divisor"), device="emulated")
    verdict = run.result(":leaves_another_divisor").verdict
    assert verdict.kind == "poisoned"
    assert "parts of the training state: reduction of the gradients" in verdict.reason


def test_a_fault_does_not_reach_the_case_after_it(planted: Run) -> None:
    """Weights changed, hooks registered, memory kept: the next case starts from a scenario of its own."""
    assert planted.kind(":raises_everywhere") == "crash"
    assert planted.kind("/state_dict") == "ok"
    assert planted.report is not None
    assert planted.report.complete


def test_the_reason_of_a_swap_names_both_tensors(planted: Run) -> None:
    reason = planted.result(":swaps_two_tensors").verdict.reason
    assert "gate_proj" in reason
    assert "up_proj" in reason


def test_an_ok_case_has_seconds_but_no_bulk(planted: Run) -> None:
    result = planted.result(":honest")
    assert result.seconds is not None
    assert result.seconds > 0
    assert result.ranks == ()
