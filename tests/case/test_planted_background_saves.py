"""An extraction may train a step of the job before it ends: what it yields is held against the weights of its call."""

from __future__ import annotations

import pytest
from program import Run, probe, user_methods

_KINDS = {
    "copies_and_trains": "ok",
    "trains_before_it_copies": "wrong",
    "keeps_the_shards": "wrong",
    "trains_while_it_yields": "wrong",
    "freezes_after_the_step": "poisoned",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    scenario = ("--strategy", "fsdp2", "--offload", "none", "--offload", "param+optimizer", "--staging", "unstaged")
    methods = user_methods(*(f"background:{name}" for name in _KINDS))
    return probe(tmp_path_factory.mktemp("planted"), *scenario, *methods, "-k", "background", device="emulated")


@pytest.mark.parametrize("name", _KINDS)
def test_what_is_yielded_must_be_the_weights_of_the_call(planted: Run, name: str) -> None:
    verdict = planted.result(f"none/unstaged/faults.background:{name}").verdict
    assert verdict.kind == _KINDS[name], verdict


def test_a_job_that_offloads_is_brought_back_for_its_step(planted: Run) -> None:
    assert planted.kind("param+optimizer/unstaged/faults.background:copies_and_trains") == "ok"
