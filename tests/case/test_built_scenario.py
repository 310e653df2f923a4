"""A model that is not what the id of its scenario says is noticed, each fact by its name."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import pytest
import torch
from program import probe, user_methods
from support.ranks import Setting, on_ranks, this_device, this_rank, world_size
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_doctor.case.built_scenario import BuiltFacts, NotAsNamed, check, derive_facts, find_mismatches, read_facts
from fsdp_doctor.case.runtime import Runtime, make_for_present_group
from fsdp_doctor.case.trainer import Start, Trainer
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.matrix.cases import Scenario, make_scenario
from fsdp_doctor.weights.fsdp import private

_TWO = Setting("emulated", 2)
_PLAIN = make_scenario({"strategy": "fsdp2", "offload": "none", "staging": "unstaged"})
_UNDER_POLICY = _PLAIN.change(offload="policy")
# What is built, what is asked for, and the facts in which the two differ.
_OTHERWISE: tuple[tuple[Scenario, Scenario, set[str]], ...] = (
    (_PLAIN.change(strategy="fsdp1"), _PLAIN.change(strategy="fsdp1-orig"), {"strategy"}),
    (_PLAIN.change(strategy="fsdp1"), _PLAIN, {"strategy", "units"}),
    (_PLAIN.change(model="qwen3-tied"), _PLAIN, {"units", "is_tied"}),
    (_PLAIN.change(sharding="size1"), _PLAIN, {"spreads", "groups"}),
    (_PLAIN, _UNDER_POLICY, {"policy", "shards_on", "moments_on", "pinned"}),
    (_UNDER_POLICY.change(pinning="unpinned"), _UNDER_POLICY, {"policy", "pinned"}),
    (_PLAIN.change(precision="fp32-compute"), _PLAIN, {"casts_to", "reduces_in"}),
    (
        _PLAIN.change(strategy="fsdp1", precision="fp32-compute"),
        _PLAIN.change(strategy="fsdp1"),
        {"casts_to", "reduces_in"},
    ),
    *((_PLAIN.change(optimizer=other), _PLAIN, {"optimizer"}) for other in ("sgd", "muon", "adamw-fused", "tensor-lr")),
    (_PLAIN.change(checkpoint="fp32"), _PLAIN, {"dtypes"}),
    (_PLAIN, _PLAIN.change(offload="optimizer"), {"moments_on"}),
    (_PLAIN.change(offload="optimizer"), _PLAIN.change(offload="optimizer-around-step"), {"comes_for_step"}),
    (_PLAIN.change(offload="param+optimizer"), _PLAIN.change(offload="moved"), {"pinned"}),
    (_UNDER_POLICY, _PLAIN.change(offload="partial"), {"policy", "shards_on", "moments_on"}),
    (
        _PLAIN.change(strategy="fsdp1", offload="partial"),
        _PLAIN.change(strategy="fsdp1", offload="policy"),
        {"policy", "shards_on", "moments_on"},
    ),
    (_PLAIN, _PLAIN.change(offload="param"), {"shards_on", "pinned"}),
    (_PLAIN.change(strategy="fsdp1"), _PLAIN.change(strategy="fsdp1", offload="param"), {"shards_on", "pinned"}),
    (
        _PLAIN.change(offload="param"),
        _PLAIN.change(offload="param", staging="staged"),
        {"shards_on", "shown_on", "pinned"},
    ),
    (_UNDER_POLICY, _UNDER_POLICY.change(staging="staged"), {"shown_on"}),
    (_PLAIN, _PLAIN.change(phase="fresh"), {"has_stepped", "moments_on"}),
    (_PLAIN.change(phase="fresh"), _PLAIN.change(phase="fresh", init="meta"), {"shards_on"}),
    (_PLAIN.change(model="qwen2"), _PLAIN, {"model"}),
    (_PLAIN.change(model="qwen3-buffers"), _PLAIN, {"has_buffers"}),
    (_PLAIN.change(model="qwen3-lora"), _PLAIN, {"has_adapters"}),
    (_PLAIN.change(dims="uneven"), _PLAIN, {"has_even_vocabulary"}),
    (_PLAIN, _PLAIN.change(backend="device-only"), {"backends"}),
)


@functools.cache
def _runtime() -> Runtime:
    place = Place(rank=this_rank(), world_size=world_size(), local_rank=this_rank(), num_nodes=1)
    return make_for_present_group(place, this_device(), pathlib.Path("/dev/null/nowhere"))


def _in_its_state(scenario: Scenario) -> Trainer:
    trainer = Trainer(scenario, _runtime(), start=Start(weights="meta" if scenario.init == "meta" else "own"))
    if scenario.phase == "trained":
        trainer.step()
        trainer.resume()
    trainer.offload()
    if scenario.staging == "staged":
        trainer.stage()
    return trainer


@functools.cache
def _facts(scenario: Scenario) -> BuiltFacts:
    trainer = _in_its_state(scenario)
    return read_facts(trainer.model, trainer.optimizer)


def _named(facts: BuiltFacts, scenario: Scenario) -> set[str]:
    asked = derive_facts(scenario, device="emulated", ranks=world_size())
    return {sentence.partition(":")[0] for sentence in find_mismatches(facts, asked)}


@on_ranks(_TWO)
def test_a_build_that_differs_from_its_id_is_named_by_each_fact() -> None:
    named = [_named(_facts(built), asked) for built, asked, _ in _OTHERWISE]
    assert named == [facts for _, _, facts in _OTHERWISE]


@on_ranks(_TWO)
def test_what_is_built_as_its_id_says_differs_in_nothing() -> None:
    scenarios = dict.fromkeys(scenario for built, asked, _ in _OTHERWISE for scenario in (built, asked))
    # The process group of this test is one for all of them.
    named = {scenario.id: _named(_facts(scenario), scenario) for scenario in scenarios if scenario.backend == "mixed"}
    assert not any(named.values()), named


@on_ranks(_TWO)
def test_missing_meshes_of_experts_and_a_wrong_number_of_ranks_are_noticed() -> None:
    trainer = _in_its_state(_PLAIN.change(model="qwen3-moe"))
    if private.has_placements_on_meshes():
        facts = read_facts(trainer.model, trainer.optimizer)
        assert _named(facts, _PLAIN.change(model="qwen3-moe", sharding="experts")) == {"groups"}
    with pytest.raises(NotAsNamed, match=r"spreads: .* ranks: 2 instead of 3"):
        check(trainer.model, trainer.optimizer, trainer.scenario, device="emulated", ranks=3)


@on_ranks(_TWO)
def test_a_model_of_a_framework_is_compared_only_by_the_requested_facts() -> None:
    """Says that its key was ignored, and nothing else, as of a framework's model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(this_device())
    optimizer = torch.optim.AdamW(fully_shard(model).parameters())
    actual = read_facts(model, optimizer)
    assert find_mismatches(actual, BuiltFacts(strategy="fsdp2", policy=frozenset({"none"}), has_stepped=False)) == []
    (sentence,) = find_mismatches(actual, BuiltFacts(strategy="fsdp1-orig", policy=frozenset({"none"})))
    assert sentence.split() == ["strategy:", "fsdp2", "instead", "of", "fsdp1-orig"]


def test_every_fact_can_be_asked_for_by_an_id() -> None:
    asked = [derive_facts(scenario, device="cuda", ranks=2) for scenario in (_PLAIN, _PLAIN.change(staging="staged"))]
    fields = [field.name for field in dataclasses.fields(BuiltFacts)]
    assert [name for name in fields if all(getattr(facts, name) is None for facts in asked)] == []


def test_an_offload_that_does_nothing_is_no_verdict_about_a_method(tmp_path: pathlib.Path) -> None:
    run = probe(
        tmp_path,
        *("--strategy", "fsdp2", "--offload", "param", "--staging", "unstaged", "--direction", "out"),
        *user_methods("misbuilt:honest"),
        *("-k", "misbuilt"),
        device="emulated",
    )
    verdict = run.result("misbuilt:honest").verdict
    assert verdict.kind == "lost", verdict
    assert "shards_on: emulated instead of cpu" in verdict.reason
