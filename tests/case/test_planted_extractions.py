"""Each comparison that is made of an extraction, tested with a fault that only it can find."""

from __future__ import annotations

import pathlib

import pytest
from program import Run, probe, user_methods

from fsdp_doctor.verdict.records import Failure

_SCENARIO = ("--strategy", "fsdp2", "--offload", "param", "--staging", "unstaged", "--method", "state_dict")
_NOT_FULL = "dtensor where a full tensor was promised"
_UNREADABLE = "(its message cannot be read: {} was raised)"
_FAULTS: dict[str, tuple[str, str]] = {
    "values:honest": ("ok", ""),
    "values:drops_a_key": ("incomplete", "missing of 25 names: model.norm.weight"),
    "values:invents_a_key": ("incomplete", "not a name of the model: model.surprise.weight"),
    "values:yields_a_key_twice": ("wrong", "came twice: model.norm.weight"),
    "values:swaps_two_tensors": ("wrong", "elements differ"),
    "values:flips_one_bit": ("wrong", "rank 1: 1 of 4096 elements differ, the first at 7"),
    "values:changes_a_shape": ("wrong", "shape (64, 256), not (256, 64): lm_head.weight"),
    "values:returns_bfloat16": ("misplaced", "dtype bfloat16 where float32 was promised"),
    "values:returns_bfloat16_and_says_so": ("ok", ""),
    "values:returns_data_on_rank_0_only": ("incomplete", "rank 1: no data on this rank"),
    "values:returns_data_on_rank_0_only_and_says_so": ("ok", ""),
    "values:yields_shards": ("wrong", "dtensor where a full tensor was promised"),
    "values:flushes_what_is_subnormal": ("wrong", "elements differ"),
    "values:loses_the_sign_of_zero": ("wrong", "0.0, not -0.0: "),
    "values:replaces_nan": ("wrong", "0.0, not nan: model.embed_tokens.weight"),
    "values:replaces_infinity": ("wrong", "not inf: model.embed_tokens.weight"),
    "values:keeps_memory": ("leak", "still referenced"),
    "values:changes_a_weight": ("poisoned", "the extraction changed 1 of"),
    "values:changes_weights_when_the_model_is_loaded": (
        "poisoned",
        "the next training step would start from other weights",
    ),
    "values:leaves_eval_mode": ("poisoned", "parts of the training state: training mode"),
    "values:freezes_a_parameter": ("poisoned", "the extraction changed 1 of"),
    "values:replaces_a_parameter": ("poisoned", "parts of the training state: model.norm.weight"),
    "values:leaves_a_hook": ("poisoned", "parts of the training state: hooks and forwards"),
    "values:leaves_no_hook": ("ok", ""),
    "values:leaves_the_number_of_ranks_as_divisor": ("ok", ""),
    "values:leaves_a_layer_unsynchronized": ("poisoned", "parts of the training state: reduction of the gradients"),
    "values:leaves_it_synchronized": ("ok", ""),
    "values:leaves_backwards_that_do_not_end": ("poisoned", "parts of the training state: reduction of the gradients"),
    "values:leaves_a_layer_unsharded": ("leak", "left unsharded: model.layers.1."),
    "values:leaves_a_layer_sharded_again": ("ok", ""),
    "values:wraps_a_forward": ("poisoned", "parts of the training state: hooks and forwards"),
    "values:changes_a_buffer_of_no_state_dict": ("poisoned", "parts of the training state: model.rotary_emb.inv_freq"),
    "values:casts_a_buffer_of_no_state_dict": ("poisoned", "parts of the training state: model.rotary_emb.inv_freq"),
    "values:changes_an_option_of_the_optimizer": ("poisoned", "parts of the training state: options of the optimizer"),
    "values:has_the_optimizer_do_nothing": ("poisoned", "the next training step changes no weight"),
    "values:never_ends": ("wrong", "goes on after 51 entries, where 25 were promised"),
    "values:yields_what_has_no_data": ("misplaced", "on meta where"),
    "values:raises_with_the_words_of_a_full_memory": ("crash", "TypeError: the policy"),
    "values:yields_names_that_are_none": ("crash", "with a str for a name, not list"),
    "values:breaks_the_next_step": ("poisoned", "RuntimeError: planted in the next training step"),
    "values:raises_everywhere": ("crash", "KeyError: 'planted on every rank'"),
    "values:raises_out_of_memory": ("oom", "can't allocate memory"),
    "values:returns_a_number": ("crash", "a method returns a mapping or yields (name, tensor), not int"),
    # A DTensor of any layout is judged by what was promised, and never as an exception of the method.
    "layouts:partial_as_full": ("wrong", _NOT_FULL),
    "layouts:strided_as_full": ("wrong", _NOT_FULL),
    "layouts:on_two_dims_as_full": ("wrong", _NOT_FULL),
    "layouts:partial_as_shard": ("wrong", "so what a rank holds is a summand and not a shard"),
    "layouts:strided_as_shard": ("ok", ""),
    "layouts:strided_with_the_rows_of_the_other_rank": ("wrong", "elements differ"),
    "layouts:on_two_dims_as_shard": ("ok", ""),
    "layouts:sharded_by_the_last_dim": ("ok", ""),
    "layouts:replicated_as_shard": ("wrong", "its shards do not make up the whole tensor once"),
    # A method that puts other functions in the place of torch's is verified by torch's.
    "patches:wrong_and_all_is_equal": ("wrong", ""),
    "patches:wrong_and_bits_are_lost": ("wrong", ""),
    "patches:wrong_and_pieces_are_lost": ("wrong", ""),
    "patches:wrong_and_nothing_is_gathered": ("wrong", ""),
    "patches:right_and_nothing_is_gathered": ("ok", ""),
    "patches:right_and_nothing_is_reduced": ("poisoned", ""),
    "patches:right_after_others": ("ok", ""),
    # Whatever a method raises is a crash with the name of its type, and ends no worker.
    "exceptions:unprintable": ("crash", f"Unprintable: {_UNREADABLE.format('ValueError')}"),
    "exceptions:from_unprintable": ("crash", "RuntimeError: what came of it"),
    "exceptions:without_notes": ("crash", "WithoutNotes: the text"),
    "exceptions:ends_whoever_reads_it": ("crash", f"EndsWhoeverReadsIt: {_UNREADABLE.format('SystemExit')}"),
    "exceptions:of_its_own_kind": ("crash", "OfItsOwnKind: the text"),
    "exceptions:keyboard_interrupt": ("crash", "KeyboardInterrupt"),
    "exceptions:generator_exit": ("crash", "GeneratorExit: the text"),
    "exceptions:generator_exit_while_it_yields": ("crash", "GeneratorExit: the text"),
    "exceptions:enormous": ("crash", "RuntimeError: begins soxxx"),
    "exceptions:no_unicode": ("crash", "RuntimeError: half a pair: \\ud800"),
    "exceptions:deep": ("crash", "RecursionError: maximum recursion depth exceeded"),
    "exceptions:long_chain": ("crash", "RuntimeError: the text"),
}
_EXCEPTIONS = [fault for fault in _FAULTS if fault.startswith("exceptions:")]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("planted")
    return probe(directory, *_SCENARIO, *user_methods(*_FAULTS), "--markdown", str(directory / "report.md"))


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_planted_fault_is_found_for_what_it_is(planted: Run, fault: str) -> None:
    kind, reason = _FAULTS[fault]
    verdict = planted.result(f"faults.{fault}").verdict
    assert verdict.kind == kind, verdict
    assert reason in verdict.reason


def test_a_fault_spares_the_next_case_and_all_formats_are_written(planted: Run) -> None:
    """Weights changed, hooks registered, memory kept: the next case starts from a scenario of its own."""
    assert planted.kind("/state_dict") == "ok"
    assert planted.report is not None
    assert planted.report.complete
    assert planted.code == 1, planted.stderr
    assert "Traceback" not in planted.stderr
    assert planted.left == []


def test_the_reason_of_a_swap_names_both_tensors(planted: Run) -> None:
    reason = planted.result("values:swaps_two_tensors").verdict.reason
    assert "gate_proj" in reason
    assert "up_proj" in reason


def test_an_ok_case_has_seconds_but_no_bulk(planted: Run) -> None:
    result = planted.result("values:honest")
    assert result.seconds is not None
    assert result.seconds > 0
    assert result.ranks == ()


def _failure(run: Run, fault: str) -> Failure:
    record = run.rank(fault, 1).record
    assert record is not None
    assert record.failure is not None
    return record.failure


@pytest.mark.parametrize("fault", _EXCEPTIONS)
def test_the_record_of_an_exception_is_no_longer_than_one_can_read(planted: Run, fault: str) -> None:
    failure = _failure(planted, fault)
    assert len(failure.message) <= 4_000
    assert len(failure.traceback) <= 16_000
    assert planted.result(fault).verdict.ranks == (0, 1)


@pytest.mark.parametrize("name", ["unprintable", "without_notes", "ends_whoever_reads_it"])
def test_the_traceback_of_an_exception_says_where_it_was_raised(planted: Run, name: str) -> None:
    assert f"in {name}" in _failure(planted, f"exceptions:{name}").traceback


def test_faults_that_show_on_a_device_alone_are_found(tmp_path: pathlib.Path) -> None:
    """The doctor waits for the device before it looks at what lies there, and not before it looks at the host."""
    expected = {
        "yields_what_is_in_flight": ("wrong", ""),
        "returns_what_is_in_flight": ("wrong", ""),
        "returns_what_has_arrived": ("ok", ""),
        "moves_a_buffer_of_no_state_dict": ("poisoned", "model.rotary_emb.inv_freq"),
        # gloo has no such reduction, and fails in the next step; on a device nothing raises.
        "leaves_another_divisor": ("poisoned", "parts of the training state: reduction of the gradients"),
        "keeps_memory": ("leak", "bytes of device memory not given back"),
        "changes_a_weight_on_rank_1": ("poisoned", ""),
    }
    scenario = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--method", "state_dict")
    run = probe(tmp_path, *scenario, *user_methods(*(f"values:{name}" for name in expected)), device="emulated")
    for name, (kind, reason) in expected.items():
        verdict = run.result(f":{name}").verdict
        assert verdict.kind == kind, verdict
        assert reason in verdict.reason
    # A change on one rank alone has both ranks build again; one of them would wait for the other for ever.
    assert run.kind("/state_dict") == "ok"
