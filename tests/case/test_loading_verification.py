"""Each comparison that is made after a load, tested with a fault that only it can find."""

from __future__ import annotations

import pathlib

import pytest
from program import Run, probe, user_paths

_LOADING = ("--direction", "in", "--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged")
_FAULTS: dict[str, tuple[str, str]] = {
    "honest": ("ok", ""),
    "loads_nothing": ("incomplete", "still what it was before the load: model.embed_tokens.weight"),
    "leaves_one_out": ("incomplete", "still what it was before the load: model.norm.weight"),
    "leaves_one_out_on_rank_1": ("incomplete", "rank 1: still what it was before the load: model.norm.weight"),
    "loads_the_other_ranks_rows": ("wrong", "elements differ"),
    "flips_one_bit": ("wrong", "rank 1: 1 of 8192 elements differ, the first at 7"),
    "rounds_through_bfloat16": ("wrong", "elements differ"),
    "flushes_what_is_subnormal": ("wrong", "elements differ"),
    "loses_the_sign_of_zero": ("wrong", "0.0, not -0.0: "),
    "replaces_nan": ("wrong", "0.0, not nan: model.embed_tokens.weight"),
    "replaces_infinity": ("wrong", "not inf: model.embed_tokens.weight"),
    "replaces_the_parameters": ("poisoned", "the optimizer holds 0 of the model's 25 parameters"),
    "freezes_a_parameter": ("poisoned", "requires_grad is False where it was True: model.norm.weight"),
    "leaves_one_layer_in_eval_mode": ("poisoned", "training is False where it was not: model.layers.1.mlp"),
    "spoils_a_buffer_that_no_state_dict_has": ("wrong", "a buffer that no state dict has"),
    "loses_a_parameter": ("incomplete", "not in the model any more: model.norm.weight"),
    "loads_when_the_step_comes": ("poisoned", "the next training step ends otherwise"),
    "raises_on_rank_0_alone": ("crash", "rank 0: KeyError: 'planted on rank 0'"),
    "ends_the_process_on_rank_1": ("died", "rank 1: ended with exit code 3"),
    "honest_optimizer": ("ok", ""),
    "forgets_the_moments": ("incomplete", "not in the optimizer's state"),
    "is_a_step_behind": ("wrong", "1 of 1 elements differ, the first at 0: 1.0, not 2.0"),
    "keeps_the_new_learning_rate": ("wrong", "is 0.0005, not 0.001: the option lr"),
    "swaps_the_moments": ("wrong", "elements differ"),
    "rounds_the_moments": ("misplaced", "dtype torch.bfloat16 where the checkpoint has torch.float32"),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    paths = user_paths(*(f"loaders:{name}" for name in _FAULTS))
    directory = tmp_path_factory.mktemp("planted")
    return probe(directory, *_LOADING, "--init", "materialized", "--path", "load_state_dict.sharded", *paths)


@pytest.mark.parametrize("fault", list(_FAULTS))
def test_a_planted_fault_of_a_loader_is_found_for_what_it_is(planted: Run, fault: str) -> None:
    kind, reason = _FAULTS[fault]
    verdict = planted.result(f"fresh/faults.loaders:{fault}").verdict
    assert verdict.kind == kind, verdict
    assert reason in verdict.reason


def test_a_loader_of_one_of_two_memories_of_fsdp1_is_wrong_in_every_scenario(tmp_path: pathlib.Path) -> None:
    scenarios = ("--strategy", "fsdp1,fsdp1-orig", "--offload", "none,policy", "--staging", "staged")
    loader = "loaders:leaves_the_old_values_in_the_flat_parameter"
    paths = (*user_paths(loader), "--path", "load_full_tensors")
    run = probe(tmp_path, "--direction", "in", *scenarios, *paths, device="emulated")
    assert run.report is not None
    found = {result.id: result.verdict.kind for result in run.report.results}
    planted = [kind for case, kind in found.items() if loader in case]
    assert planted == ["wrong"] * 4, found
    assert [kind for case, kind in found.items() if case.endswith("/load_full_tensors")] == ["ok"] * 4, found


def test_a_faulty_loader_does_not_reach_the_case_after_it(planted: Run) -> None:
    assert planted.kind("fresh/load_state_dict.sharded") == "ok"
    assert planted.report is not None
    assert planted.report.complete


_MISFITS: dict[tuple[str, str], tuple[str, str]] = {
    ("extra-key", "honest"): ("ok", "refused on every rank: LoadError: "),
    ("extra-key", "skips_what_is_superfluous"): ("incomplete", "extra.weight of the checkpoint"),
    ("missing-key", "honest"): ("ok", "refused on every rank: LoadError: "),
    ("missing-key", "skips_what_is_missing_and_says_nothing"): ("incomplete", "not reported as missing: model.norm"),
    ("missing-key", "skips_what_is_missing_and_says_so"): ("ok", ""),
    ("bf16", "honest"): ("ok", "refused on every rank: LoadError: "),
    ("fp32", "honest"): ("ok", "refused on every rank: LoadError: "),
}


@pytest.fixture(scope="module")
def misfits(tmp_path_factory: pytest.TempPathFactory) -> Run:
    paths = user_paths(*dict.fromkeys(f"loaders:{name}" for _, name in _MISFITS))
    checkpoints = ",".join(dict.fromkeys(checkpoint for checkpoint, _ in _MISFITS))
    directory = tmp_path_factory.mktemp("misfits")
    return probe(directory, *_LOADING, "--checkpoint", checkpoints, "--path", "rank_files", *paths)


@pytest.mark.parametrize(("checkpoint", "loader"), list(_MISFITS))
def test_a_checkpoint_that_does_not_fit_is_refused_everywhere_or_loaded_right(
    misfits: Run, checkpoint: str, loader: str
) -> None:
    kind, reason = _MISFITS[checkpoint, loader]
    verdict = misfits.result(f"{checkpoint}/faults.loaders:{loader}").verdict
    assert (verdict.kind, reason in verdict.reason) == (kind, True), verdict


@pytest.mark.parametrize("axis", [("--init", "meta"), ("--checkpoint", "bf16,extra-key,missing-key")])
def test_a_loader_of_an_optimizer_is_not_tried_where_only_weights_can_be_loaded(
    tmp_path: pathlib.Path, axis: tuple[str, str]
) -> None:
    run = probe(tmp_path, *_LOADING, *axis, *user_paths("loaders:honest_optimizer"))
    assert run.report is not None
    found = [result.verdict for result in run.report.results if ":honest_optimizer" in result.id]
    assert {verdict.kind for verdict in found} == {"unsupported"}
    assert all("optimizer" in verdict.reason for verdict in found)


def test_a_loader_that_gives_up_on_one_rank_alone_is_no_refusal(tmp_path: pathlib.Path) -> None:
    run = probe(tmp_path, *_LOADING, "--checkpoint", "extra-key", *user_paths("loaders:raises_on_rank_0_alone"))
    verdict = run.result(":raises_on_rank_0_alone").verdict
    assert verdict.kind == "crash"
    assert "rank 0: KeyError: 'planted on rank 0'" in verdict.reason
