"""What a step holds that follows from torch's source: of replicas, of the last gradient, of FSDP1 without shards."""

from __future__ import annotations

import functools

import pytest

from fsdp_doctor.ledgers.ledger import DeviceLedger, rounded
from fsdp_doctor.matrix.cases import scenario_of
from fsdp_doctor.plan.job import BF16, Dtypes, RoleSetup
from fsdp_doctor.plan.stages import Predictor
from fsdp_doctor.plan.training_step import Fsdp2Replay, Timeline, UnitShard

_PREDICTOR = functools.cache(Predictor)
_ROWS, _LAST = 4096, 1024
_UNIT = UnitShard(
    name="layer",
    padded=(_ROWS // 2, _LAST // 2),
    local=(_ROWS // 2, _LAST // 2),
    full=(_ROWS, _LAST),
    originals=(_ROWS, _LAST),
)
_PLAIN = {"strategy": "fsdp2", "offload": "none", "staging": "unstaged"}
_FP32_SUM = rounded((_ROWS + _LAST) // 2 * 4)
_INPUT = rounded((_ROWS + _LAST) * 4)


def _after_backward(*, offload: str, replicas: int, master: int = 4) -> tuple[DeviceLedger, DeviceLedger]:
    """At the end of a unit's backward, and of the whole."""
    scenario = scenario_of(_PLAIN | {"offload": offload})
    setup = RoleSetup(role="actor", scenario=scenario, shard_ranks=2, replicas=replicas, dtypes=Dtypes(master=master))
    timeline = Timeline()
    replay = Fsdp2Replay(timeline, setup)
    replay.pre_backward(_UNIT, None)
    gradients = sum(rounded(numel * 2) for numel in _UNIT.originals)
    timeline.allocate("gradients", gradients)
    replay.post_backward(_UNIT, gradients)
    of_unit = timeline.end_stage()
    replay.end_backward()
    return of_unit, timeline.end_stage()


def test_the_last_gradient_of_a_unit_is_there_until_it_is_reduced() -> None:
    of_unit, _ = _after_backward(offload="policy", replicas=1)
    assert of_unit.peak == _INPUT + _FP32_SUM + rounded(_LAST * 2)


@pytest.mark.parametrize(
    ("offload", "master", "kept"), [("policy", 4, 1), ("policy", 2, 1), ("none", 2, 1), ("none", 4, 0)]
)
def test_what_replicas_add_up_is_kept_until_the_backward_is_over(offload: str, master: int, kept: int) -> None:
    alone, end_alone = _after_backward(offload=offload, replicas=1, master=master)
    added_up, end = _after_backward(offload=offload, replicas=2, master=master)
    assert added_up.allocated - alone.allocated == kept * _FP32_SUM
    assert end.held == end_alone.held


def test_a_unit_whose_parameters_are_all_in_others_is_reduced_without_any() -> None:
    setup = RoleSetup(role="actor", scenario=scenario_of(_PLAIN), shard_ranks=2)
    timeline = Timeline()
    Fsdp2Replay(timeline, setup).post_backward(UnitShard(name="root", padded=(), local=(), full=(), originals=()), 0)
    assert timeline.end_stage().peak == 0


@pytest.mark.parametrize(("strategy", "kept"), [("fsdp1", 1), ("fsdp1-orig", 0)])
def test_an_offload_of_fsdp1_without_shards_frees_only_original_parameters_in_the_dtype_that_is_computed_in(
    strategy: str, kept: int
) -> None:
    held = {}
    for master in (BF16, 4):
        scenario = scenario_of({"strategy": strategy, "offload": "param", "staging": "staged"})
        setup = RoleSetup(role="actor", scenario=scenario, shard_ranks=1, length=16, dtypes=Dtypes(master=master))
        stages = {one.stage: one.device for one in _PREDICTOR("small").ledgers(setup) if one.device}
        whole = stages["trained"].held["parameters"]
        held[master] = [
            sum(stages[stage].held.get(part, 0) for part in ("parameters", "unsharded parameters")) / whole
            for stage in ("offloaded", "staged", "offloaded again", "loaded", "trained again")
        ]
    assert held == {BF16: [kept, 1 + kept, kept, 1 + kept, 1], 4: [0, 1, 0, 1, 1]}
