"""Experts that are divided over ranks before FSDP shards them: what the matrix builds of them, and its verdicts."""

from __future__ import annotations

import functools
import pathlib

import pytest
import torch
from program import Run, probe
from support.ranks import Setting, on_ranks, this_device, this_rank, world_size

from fsdp_doctor.case import models, reference
from fsdp_doctor.case.built_scenario import derive_facts, find_mismatches, read_facts
from fsdp_doctor.case.runtime import Runtime, make_for_present_group
from fsdp_doctor.case.trainer import Trainer
from fsdp_doctor.machine.launch import Place
from fsdp_doctor.matrix.axes import Dims, Model
from fsdp_doctor.matrix.cases import Scenario, make_scenario

on_four = on_ranks(Setting("emulated", 4))

_VALUES = {"strategy": "fsdp2", "offload": "none", "staging": "unstaged", "model": "qwen3-moe", "phase": "fresh"}
_DIVIDED = tuple(
    make_scenario({**_VALUES, "sharding": kind, "precision": "fp32-compute"}) for kind in ("2d", "hidden-experts")
)


@functools.cache
def _runtime() -> Runtime:
    place = Place(rank=this_rank(), world_size=world_size(), local_rank=this_rank(), num_nodes=1)
    return make_for_present_group(place, this_device(), pathlib.Path("/dev/null/nowhere"))


def _unsharded() -> torch.nn.Module:
    model = models.build(Model.QWEN3_MOE, Dims.EVEN, None)
    models.add_special_values(model)
    return model


@on_four
def test_the_reference_has_all_experts_as_they_were_before_they_were_divided() -> None:
    expected = _unsharded().state_dict()
    for scenario in _DIVIDED:
        full = reference.take(Trainer(scenario, _runtime()).model, None, _runtime()).full
        assert full.keys() == expected.keys()
        different = [
            name
            for name, tensor in full.items()
            if not torch.equal(*(t.view(torch.uint8) for t in (tensor, expected[name])))
        ]
        assert different == [], scenario.id


@on_four
def test_divided_experts_compute_as_all_of_them() -> None:
    tokens = torch.arange(1, 33).view(2, 16)
    with torch.no_grad():
        expected = _unsharded()(input_ids=tokens).logits[..., 1:-1]
        for scenario in _DIVIDED:
            logits = Trainer(scenario, _runtime()).model(input_ids=tokens.to(this_device())).logits
            torch.testing.assert_close(logits[..., 1:-1].cpu(), expected, msg=scenario.id)


@on_four
def test_what_is_divided_otherwise_than_its_id_says_is_noticed() -> None:
    def differs(built: Scenario, asked: Scenario) -> set[str]:
        trainer = Trainer(built, _runtime())
        facts = read_facts(trainer.model, trainer.optimizer)
        sentences = find_mismatches(facts, derive_facts(asked, device=this_device().type, ranks=4))
        return {sentence.partition(":")[0] for sentence in sentences}

    both, hidden = _DIVIDED
    assert differs(both, both) == differs(hidden, hidden) == set()
    assert differs(both, hidden) == differs(hidden, both) == {"spreads"}
    assert differs(hidden.change(sharding="full"), hidden) == {"units", "spreads"}


_OF_EXTRACTION, _OF_LOAD = "hidden-experts-taken-for-all", "hidden-experts-mixed-by-dcp"
_KNOWN = {
    "hidden-experts/state_dict.to.full_tensor": _OF_EXTRACTION,
    "hidden-experts/dcp": _OF_EXTRACTION,
    "fresh/hidden-experts/dcp.load.model+optimizer": _OF_LOAD,
}
_FIXES = ("load_full_tensors", "load_optimizer_state")
_LOADS = (*_FIXES, "set_model_state_dict.sharded", "rank_files.model+optimizer")
_RIGHT = [
    case
    for sharding in ("hidden-experts", "2d")
    for case in (
        *(f"{sharding}/{name}" for name in ("full_tensors", "local_shards")),
        *(
            f"fresh/{sharding}/{name}"
            for name in (*_FIXES, "set_model_state_dict.sharded", "rank_files.model+optimizer")
        ),
        # What two ranks saved, of which each had half of the experts.
        *(f"fresh/{sharding}/other-world/{name}" for name in _FIXES),
    )
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    cases = [word for name in (*_KNOWN, *_RIGHT) for word in ("--case", f"fsdp2/none/unstaged/qwen3-moe/{name}")]
    ranks = ("--nproc", "4", "--saved-by", "2")
    return probe(tmp_path_factory.mktemp("divided"), *ranks, *cases, device="emulated")


def test_what_gathers_within_a_group_is_wrong_and_known(run: Run) -> None:
    for case, known in _KNOWN.items():
        result = run.result(f"fsdp2/none/unstaged/qwen3-moe/{case}")
        assert (result.verdict.kind, result.known) == ("wrong", known), result.verdict


def test_the_fixes_and_what_keeps_to_its_rank_are_right(run: Run) -> None:
    kinds = {case: run.result(f"fsdp2/none/unstaged/qwen3-moe/{case}").verdict for case in _RIGHT}
    assert all(verdict.kind == "ok" for verdict in kinds.values()), kinds
