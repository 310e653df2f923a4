"""Bugs of frameworks that lost or mixed up experts without an error: the verification finds each, on its ranks."""

from __future__ import annotations

import re

import pytest
from program import Run, probe

_SCENARIO = "fsdp2/none/unstaged/qwen3-moe"
_EVERYWHERE, _GROUP_1 = {0, 1, 2, 3}, {1, 3}


def _name(case: str) -> str:
    where, _, function = case.rpartition("/")
    return f"{_SCENARIO}/{where}/faults.experts:{function}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    extractions = ("gathers_every_group", "gathers_its_mesh_alone", "begins_at_another_group")
    keeping = ("gathers_every_group", "keeps_one_buffer")
    loads = ("loads_each_group", "counts_from_zero", "broadcasts_rank_0s", "writes_into_a_cast", "leaves_the_shards")
    cases = [f"hidden-experts/{name}" for name in extractions]
    cases += [f"hidden-experts/keeps-views/{name}" for name in keeping]
    cases += [f"fresh/hidden-experts/{name}" for name in loads]
    words = [word for case in cases for word in ("--case", _name(case))]
    return probe(tmp_path_factory.mktemp("bugs"), "--nproc", "4", *words, device="emulated")


def _verdict(run: Run, case: str) -> tuple[str, set[int], str]:
    """Returns the verdict's kind, the ranks that show it, and its reason."""
    verdict = run.result(_name(case)).verdict
    others = " ".join(sentence for sentence in verdict.also if "elements differ" in sentence)
    return verdict.kind, {*verdict.ranks, *map(int, re.findall(r"\brank (\d)", others))}, verdict.reason


@pytest.mark.parametrize("consumer", ["", "/keeps-views"])
def test_what_gathers_every_group_is_right(run: Run, consumer: str) -> None:
    assert _verdict(run, f"hidden-experts{consumer}/gathers_every_group")[0] == "ok"


@pytest.mark.parametrize(
    "case",
    [
        "hidden-experts/gathers_its_mesh_alone",
        "hidden-experts/begins_at_another_group",
        "hidden-experts/keeps-views/keeps_one_buffer",
    ],
)
def test_experts_that_are_lost_or_mixed_up_are_wrong_on_every_rank(run: Run, case: str) -> None:
    kind, ranks, reason = _verdict(run, case)
    assert (kind, ranks or _EVERYWHERE) == ("wrong", _EVERYWHERE)
    assert "mlp.experts." in reason
    assert "self_attn" not in reason


def test_what_loads_each_groups_experts_is_right(run: Run) -> None:
    assert _verdict(run, "fresh/hidden-experts/loads_each_group")[0] == "ok"


@pytest.mark.parametrize("name", ["counts_from_zero", "broadcasts_rank_0s"])
def test_experts_of_rank_0_are_wrong_on_ranks_of_the_other_group(run: Run, name: str) -> None:
    kind, ranks, reason = _verdict(run, f"fresh/hidden-experts/{name}")
    assert (kind, ranks) == ("wrong", _GROUP_1), reason
    assert "mlp.experts." in reason


@pytest.mark.parametrize("name", ["writes_into_a_cast", "leaves_the_shards"])
def test_experts_that_are_not_loaded_are_noticed_on_every_rank(run: Run, name: str) -> None:
    kind, ranks, reason = _verdict(run, f"fresh/hidden-experts/{name}")
    assert (kind, ranks or _EVERYWHERE) == ("incomplete", _EVERYWHERE), reason
    assert "still what it was before the load" in reason
