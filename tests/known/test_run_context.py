"""Tests what the catalogue asks of a run: its shard groups, whose shards are uneven, when its copies are done."""

from __future__ import annotations

import math

import pytest

from fsdp_doctor.known.run_context import EVEN_DIMS, RunContext
from fsdp_doctor.matrix.axes import AXIS, Sharding
from fsdp_doctor.matrix.cases import Scenario, make_scenario


def _scenario(**values: str) -> Scenario:
    return make_scenario({"strategy": "fsdp2", "offload": "none", "staging": "unstaged"}).change(**values)


@pytest.mark.parametrize(
    ("sharding", "sizes"), [("full", (1, 2, 3, 8)), ("hsdp", (2, 2, 2, 2)), ("size1", (1, 1, 1, 1))]
)
def test_the_shard_group_is_all_ranks_or_two_or_one(sharding: Sharding, sizes: tuple[int, ...]) -> None:
    groups = [RunContext(world_size=ranks).shard_group(_scenario(sharding=sharding)) for ranks in (1, 2, 3, 8)]
    assert groups == list(sizes)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("model", EVEN_DIMS)
def test_even_dims_are_what_the_models_are_built_with(model: str) -> None:
    from fsdp_doctor.case import models

    if reason := models.explain_unsupported(model):
        pytest.skip(reason)
    for dims in ("even", "uneven"):
        rows = [parameter.shape[0] for parameter in models.build(model, dims, None).parameters()]
        for ranks in (1, 2, 3, 4, 8, 16):
            divides = all(number % ranks == 0 for number in rows)
            expected = ("even",) if divides else ("uneven",)
            assert RunContext(world_size=ranks).list_possible_shards(_scenario(model=model, dims=dims)) == expected, (
                ranks
            )
        if dims == "even":
            assert math.gcd(*rows) == EVEN_DIMS[model]  # type: ignore[index]


def test_every_model_but_the_users_own_has_its_even_dims() -> None:
    assert set(EVEN_DIMS) == set(AXIS["model"].values) - {"custom"}
    assert RunContext(world_size=2).list_possible_shards(_scenario(model="custom")) == ("even", "uneven")
    assert RunContext(world_size=1).list_possible_shards(_scenario(model="custom")) == ("even",)


@pytest.mark.parametrize(
    ("device", "late", "done"),
    [
        ("cpu", True, "at once"),
        ("emulated", True, "late"),
        ("emulated", False, "at once"),
        ("cuda", True, "at any time"),
        ("xpu", True, "at any time"),
    ],
)
def test_non_blocking_copies_are_late_on_emulation_and_anytime_on_accelerators(
    device: str, late: bool, done: str
) -> None:
    assert RunContext(device=device, late_completion=late).non_blocking_copies == done
