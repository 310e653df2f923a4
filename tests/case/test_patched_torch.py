"""A path that puts other functions in the place of torch's is judged by torch's, and leaves no other path with them."""

from __future__ import annotations

import pytest
from program import Run, probe, user_paths

_LOADING = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--direction", "in")
_EXTRACTION = ("--strategy", "fsdp2", "--offload", "none", "--staging", "unstaged", "--path", "state_dict")
_EXTRACTIONS = {
    "wrong_and_all_is_equal": "wrong",
    "wrong_and_bits_are_lost": "wrong",
    "wrong_and_pieces_are_lost": "wrong",
    "wrong_and_nothing_is_gathered": "wrong",
    "right_and_nothing_is_gathered": "ok",
    "right_and_nothing_is_reduced": "poisoned",
    "right_after_others": "ok",
}
_LOADS = {
    "loads_nothing_and_all_is_equal": ("incomplete", "model.embed_tokens.weight"),
    "loads_and_copies_nothing_after_it": ("ok", ""),
    "adds_a_param_group": ("wrong", "param groups"),
    "loses_the_param_groups": ("wrong", "param groups"),
    "makes_the_steps_numbers": ("wrong", "0.step"),
}


@pytest.fixture(scope="module")
def extractions(tmp_path_factory: pytest.TempPathFactory) -> Run:
    paths = user_paths(*(f"patches:{name}" for name in _EXTRACTIONS))
    return probe(tmp_path_factory.mktemp("extractions"), *_EXTRACTION, *paths)


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> Run:
    paths = user_paths(*(f"patches:{name}" for name in _LOADS))
    directory = tmp_path_factory.mktemp("loads")
    selected = ("--init", "materialized", "--checkpoint", "exact", "--path", "load_full_tensors")
    return probe(directory, *_LOADING, *selected, *paths)


@pytest.mark.parametrize("fault", list(_EXTRACTIONS))
def test_an_extraction_is_verified_with_functions_of_torch_that_it_did_not_patch(extractions: Run, fault: str) -> None:
    assert extractions.kind(f":{fault}") == _EXTRACTIONS[fault], extractions.result(f":{fault}").verdict


@pytest.mark.parametrize("fault", list(_LOADS))
def test_a_load_is_verified_whatever_it_made_of_torch_and_of_the_optimizer(loads: Run, fault: str) -> None:
    kind, named = _LOADS[fault]
    verdict = loads.result(f":{fault}").verdict
    assert verdict.kind == kind, verdict
    assert named in verdict.reason


def test_a_path_of_the_matrix_beside_them_is_as_it_would_be_alone(extractions: Run, loads: Run) -> None:
    assert extractions.kind("/state_dict") == "ok"
    assert loads.kind("/load_full_tensors") == "ok"
