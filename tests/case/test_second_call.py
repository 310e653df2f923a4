"""A function of the user's own is called again after the next step: what it keeps from the first call shows."""

from __future__ import annotations

import pytest
from program import Run, probe, user_methods

_SCENARIOS = ("--strategy", "fsdp2,fsdp1", "--offload", "param", "--staging", "unstaged")
_STRATEGIES = ("fsdp2", "fsdp1")
_STALE = "stale, the values of before the last training step"
_EXPECTED: dict[str, tuple[str, str]] = {
    "keeps_on_the_module": ("wrong", f"rank 0: the second call: {_STALE}: model.embed_tokens.weight"),
    "keeps_on_rank_1": ("wrong", f"rank 1: the second call: {_STALE}: lm_head.weight"),
    "keeps_what_it_yields": ("wrong", f"the second call: {_STALE}"),
    "reads_anew_into_what_it_keeps": ("ok", ""),
    "works_once": ("crash", "the second call: RuntimeError: planted: it was sent before"),
}


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Run:
    names = ("keeps_in_a_global", *_EXPECTED)
    methods = user_methods(*(f"caches:{name}" for name in names))
    return probe(tmp_path_factory.mktemp("called"), *_SCENARIOS, *methods, "-k", "caches", device="emulated")


@pytest.mark.parametrize("strategy", _STRATEGIES)
@pytest.mark.parametrize("name", list(_EXPECTED))
def test_a_caching_function_is_judged_by_its_output_after_the_next_step(called: Run, strategy: str, name: str) -> None:
    kind, reason = _EXPECTED[name]
    verdict = called.result(f"{strategy}/param/unstaged/faults.caches:{name}").verdict
    assert verdict.kind == kind, verdict
    assert verdict.reason.startswith(reason)


def test_values_kept_in_a_global_are_stale_and_fresh_values_are_right(called: Run) -> None:
    verdict = called.result("fsdp2/param/unstaged/faults.caches:keeps_in_a_global").verdict
    assert verdict.kind == "wrong"
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)]
    assert verdict.reason == f"the second call: {_STALE}: {', '.join(names)}"


def test_memory_that_is_kept_is_told_beside_the_values(called: Run) -> None:
    verdict = called.result("fsdp2/param/unstaged/faults.caches:keeps_what_it_yields").verdict
    assert any(sentence.startswith("leak: ") for sentence in verdict.also)
