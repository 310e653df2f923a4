"""Each comparison that is made after a load, tested with a fault that only it can find."""

from __future__ import annotations

import pathlib

import pytest
from program import Run, probe, user_methods

_LOADING = ("--direction", "in", "--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged")
_FAULTS: dict[str, tuple[str, str]] = {
    "loaders:honest": ("ok", ""),
    "loaders:loads_nothing": ("incomplete", "still what it was before the load: model.embed_tokens.weight"),
    "loaders:leaves_one_out": ("incomplete", "still what it was before the load: model.norm.weight"),
    "loaders:leaves_one_out_on_rank_1": ("incomplete", "rank 1: still what it was before the load: model.norm.weight"),
    "loaders:loads_the_other_ranks_rows": ("wrong", "elements differ"),
    "loaders:flips_one_bit": ("wrong", "rank 1: 1 of 8192 elements differ, the first at 7"),
    "loaders:rounds_through_bfloat16": ("wrong", "elements differ"),
    "loaders:flushes_what_is_subnormal": ("wrong", "elements differ"),
    "loaders:loses_the_sign_of_zero": ("wrong", "0.0, not -0.0: "),
    "loaders:replaces_nan": ("wrong", "0.0, not nan: model.embed_tokens.weight"),
    "loaders:replaces_infinity": ("wrong", "not inf: model.embed_tokens.weight"),
    "loaders:replaces_the_parameters": ("poisoned", "the optimizer holds 0 of the model's 25 parameters"),
    "loaders:freezes_a_parameter": ("poisoned", "requires_grad is False where it was True: model.norm.weight"),
    "loaders:leaves_one_layer_in_eval_mode": ("poisoned", "training is False where it was not: model.layers.1.mlp"),
    "loaders:spoils_a_buffer_that_no_state_dict_has": ("wrong", "a buffer that no state dict has"),
    "loaders:casts_a_buffer_that_no_state_dict_has": ("misplaced", "model.rotary_emb.inv_freq"),
    "loaders:loses_a_parameter": ("incomplete", "not in the model any more: model.norm.weight"),
    "loaders:loads_when_the_step_comes": ("poisoned", "the next training step ends otherwise"),
    "loaders:raises_on_rank_0_alone": ("crash", "rank 0: KeyError: 'planted on rank 0'"),
    "loaders:ends_the_process_on_rank_1": ("died", "rank 1: ended with exit code 3"),
    "loaders:honest_optimizer": ("ok", ""),
    "loaders:forgets_the_moments": ("incomplete", "not in the optimizer's state"),
    "loaders:is_a_step_behind": ("wrong", "1 of 1 elements differ, the first at 0: 1.0, not 2.0"),
    "loaders:keeps_the_new_learning_rate": ("wrong", "is 0.0005, not 0.001: the option lr"),
    "loaders:swaps_the_moments": ("wrong", "elements differ"),
    "loaders:rounds_the_moments": ("misplaced", "dtype torch.bfloat16 where the checkpoint has torch.float32"),
    # A load is verified by torch's functions, whatever it put in their place, and whatever it made of the optimizer.
    "patches:loads_nothing_and_all_is_equal": ("incomplete", "model.embed_tokens.weight"),
    "patches:loads_and_copies_nothing_after_it": ("ok", ""),
    "patches:adds_a_param_group": ("wrong", "param groups"),
    "patches:loses_the_param_groups": ("wrong", "param groups"),
    "patches:makes_the_steps_numbers": ("wrong", "0.step"),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("planted")
    selected = ("--init", "materialized", "--checkpoint", "exact", "--method", "load_state_dict.sharded")
    return probe(directory, *_LOADING, *selected, *user_methods(*_FAULTS))


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_planted_fault_of_a_loader_is_found_for_what_it_is(planted: Run, fault: str) -> None:
    kind, reason = _FAULTS[fault]
    verdict = planted.result(f"fresh/faults.{fault}").verdict
    assert verdict.kind == kind, verdict
    assert reason in verdict.reason


def test_a_faulty_loader_does_not_reach_the_case_after_it(planted: Run) -> None:
    assert planted.kind("fresh/load_state_dict.sharded") == "ok"
    assert planted.report is not None
    assert planted.report.complete


def test_a_load_into_a_trained_optimizer_must_replace_the_step_counters(tmp_path: pathlib.Path) -> None:
    phase = ("--phase", "after-raised-forward", "--method", "load_optimizer_state")
    run = probe(tmp_path, *_LOADING, *phase, *user_methods("loaders:keeps_its_own_step_counters"))
    verdict = run.result("faults.loaders:keeps_its_own_step_counters").verdict
    assert (verdict.kind, "0: 1.0, not 2.0" in verdict.reason) == ("wrong", True), verdict
    assert run.kind("after-raised-forward/load_optimizer_state") == "ok"


def test_a_load_that_misses_the_flat_parameter_is_wrong_in_every_scenario(tmp_path: pathlib.Path) -> None:
    scenarios = ("--strategy", "fsdp1,fsdp1-orig", "--offload", "none,policy", "--staging", "staged")
    loader = "loaders:leaves_the_old_values_in_the_flat_parameter"
    methods = (*user_methods(loader), "--method", "load_full_tensors")
    run = probe(tmp_path, "--direction", "in", *scenarios, *methods, device="emulated")
    assert run.report is not None
    found = {result.id: result.verdict.kind for result in run.report.results}
    planted = [kind for case, kind in found.items() if loader in case]
    assert planted == ["wrong"] * 4, found
    assert [kind for case, kind in found.items() if case.endswith("/load_full_tensors")] == ["ok"] * 4, found


_MISFITS: dict[tuple[str, str], tuple[str, str]] = {
    ("extra-key", "honest"): ("refused", "LoadError: "),
    ("extra-key", "refuses_every_checkpoint"): ("crash", "KeyError: 'planted on every rank'"),
    ("extra-key", "refuses_what_does_not_fit_and_ends_on_what_does"): ("crash", "KeyError: 'planted on every rank'"),
    ("extra-key", "refuses_what_does_not_fit_and_spoils_what_does"): ("crash", "LoadError: "),
    ("extra-key", "skips_what_is_superfluous"): ("incomplete", "extra.weight of the checkpoint"),
    ("extra-key", "honest_optimizer"): ("unsupported", "optimizer"),
    # Given up on one rank alone, which is no refusal.
    ("extra-key", "raises_on_rank_0_alone"): ("crash", "rank 0: KeyError: 'planted on rank 0'"),
    ("missing-key", "honest"): ("refused", "LoadError: "),
    ("missing-key", "skips_what_is_missing_and_says_nothing"): ("incomplete", "not reported as missing: model.norm"),
    ("missing-key", "skips_what_is_missing_and_says_so"): ("ok", ""),
    ("bf16", "honest"): ("refused", "LoadError: "),
    ("fp32", "honest"): ("refused", "LoadError: "),
}


@pytest.fixture(scope="module")
def misfits(tmp_path_factory: pytest.TempPathFactory) -> Run:
    names = (f"fsdp2/none/unstaged/fresh/{checkpoint}/faults.loaders:{loader}" for checkpoint, loader in _MISFITS)
    return probe(tmp_path_factory.mktemp("misfits"), *(word for name in names for word in ("--case", name)))


@pytest.mark.parametrize(("checkpoint", "loader"), list(_MISFITS))
def test_a_checkpoint_that_does_not_fit_is_refused_everywhere_or_loaded_right(
    misfits: Run, checkpoint: str, loader: str
) -> None:
    kind, reason = _MISFITS[checkpoint, loader]
    verdict = misfits.result(f"{checkpoint}/faults.loaders:{loader}").verdict
    assert (verdict.kind, reason in verdict.reason) == (kind, True), verdict


@pytest.mark.parametrize(
    ("loader", "exact"),
    [
        ("refuses_every_checkpoint", "crash"),
        ("refuses_what_does_not_fit_and_ends_on_what_does", "died"),
        ("refuses_what_does_not_fit_and_spoils_what_does", "wrong"),
    ],
)
def test_a_refusal_says_that_the_loader_also_fails_on_exact_checkpoints(misfits: Run, loader: str, exact: str) -> None:
    """The exact checkpoint was not selected: it is tried for the sake of the refusal, and has no result of its own."""
    verdict = misfits.result(f"extra-key/faults.loaders:{loader}").verdict
    (also,) = verdict.also
    assert f": {exact}: " in also
    assert misfits.report is not None
    assert all(result.case.scenario.checkpoint != "exact" for result in misfits.report.results)


def test_the_exceptions_of_every_rank_are_kept_for_an_unjustified_refusal(misfits: Run) -> None:
    ranks = misfits.result("extra-key/faults.loaders:refuses_every_checkpoint").ranks
    failures = [report.record.failure for report in ranks if report.record is not None]
    assert [failure.type for failure in failures if failure is not None] == ["KeyError"] * 2
    assert misfits.result("extra-key/faults.loaders:honest").ranks == ()


def test_both_names_of_a_tied_weight_are_a_checkpoint_that_fits(tmp_path: pathlib.Path) -> None:
    """The state dict of a tied model has both."""
    methods = ("--method", "rank_files", *user_methods("loaders:refuses_every_checkpoint"))
    run = probe(tmp_path, *_LOADING, "--checkpoint", "tied-twice", *methods)
    assert run.kind("qwen3-tied/fresh/tied-twice/rank_files") == "ok"
    verdict = run.result("qwen3-tied/fresh/tied-twice/faults.loaders:refuses_every_checkpoint").verdict
    assert (verdict.kind, verdict.also) == ("crash", ())


def test_a_nonpersistent_buffer_left_on_the_host_by_a_load_is_misplaced(tmp_path: pathlib.Path) -> None:
    name = "moves_a_buffer_that_no_state_dict_has_to_the_host"
    options = ("--init", "materialized", "--checkpoint", "exact", "--method", "load_full_tensors")
    run = probe(tmp_path, *_LOADING, *options, *user_methods(f"loaders:{name}"), device="emulated")
    verdict = run.result(f":{name}").verdict
    assert verdict.kind == "misplaced"
    assert "model.rotary_emb.inv_freq" in verdict.reason
    assert run.kind("/load_full_tensors") == "ok"
