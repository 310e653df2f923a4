"""The shards of one rank, and what a step holds that follows from torch's source."""

from __future__ import annotations

import functools

import pytest
import torch

from fsdp_doctor.examination.memory_records import DeviceMemory, round_to_power_of_two, round_up
from fsdp_doctor.matrix.axes import Strategy
from fsdp_doctor.matrix.cases import make_scenario
from fsdp_doctor.plan.job import BF16, Dtypes, RoleSetup
from fsdp_doctor.plan.meta_model import ModelShape, ShapedParameter, ShapedUnit
from fsdp_doctor.plan.stages import Predictor
from fsdp_doctor.plan.training_step import Fsdp2Replay, Timeline, UnitShard, shard_units

LAYER = ShapedUnit("layer 0", (ShapedParameter("weight", (5, 4)), ShapedParameter("bias", (3,))))
SHAPE = ModelShape(
    name="of the test",
    layers=(LAYER,),
    embedding=ShapedUnit("embedding", (ShapedParameter("tokens", (7, 4)),)),
    root=ShapedUnit("root", (ShapedParameter("norm", (4,)),)),
    buffer_bytes=(),
)


def test_fsdp2_cuts_each_parameter_into_chunks_of_rows_as_torch_does() -> None:
    for ranks in (1, 2, 3, 4, 8):
        for rank in range(ranks):
            (layer,) = shard_units(SHAPE, Strategy.FSDP2, rank=rank, ranks=ranks).layers
            chunks = [tensor.chunk(ranks) for tensor in (torch.empty(5, 4), torch.empty(3))]
            assert layer.local == tuple(one[rank].numel() if rank < len(one) else 0 for one in chunks)
            assert layer.padded == tuple(one[0].numel() for one in chunks)


def test_fsdp1_has_one_flat_parameter_per_unit_and_embeddings_in_the_root() -> None:
    shards = shard_units(SHAPE, Strategy.FSDP1, rank=1, ranks=2)
    assert shards.embedding is None
    assert (shards.root.padded, shards.layers[0].padded) == ((16,), (12,))


def test_the_parts_of_original_parameters_add_up_over_the_fsdp1_ranks() -> None:
    parts = [shard_units(SHAPE, Strategy.FSDP1_ORIG, rank=rank, ranks=3).layers[0].local for rank in range(3)]
    assert [sum(column) for column in zip(*parts, strict=True)] == [20, 3]


def test_more_ranks_than_rows_multiply_what_a_gather_fills() -> None:
    (layer,) = shard_units(SHAPE, Strategy.FSDP2, rank=0, ranks=64).layers
    assert layer.full == (64 * 4, 64)


def test_a_pinned_tensor_takes_the_next_power_of_two() -> None:
    sizes = (0, 1, 512, 513, 1 << 20, (1 << 20) + 1)
    assert [round_to_power_of_two(nbytes) for nbytes in sizes] == [0, 1, 512, 1024, 1 << 20, 2 << 20]


def test_each_stage_keeps_its_highest_moment_by_class() -> None:
    timeline = Timeline()
    timeline.allocate("parameters", 512)
    with timeline.allocate_temporarily("activations", 1024):
        pass
    first = timeline.end_stage()
    assert (first.held, first.at_peak) == ({"parameters": 512}, {"parameters": 512, "activations": 1024})
    assert timeline.end_stage().peak == 512
    assert [round_up(nbytes) for nbytes in (0, 1, 512, 513)] == [0, 512, 512, 1024]


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
_FP32_SUM = round_up((_ROWS + _LAST) // 2 * 4)
_INPUT = round_up((_ROWS + _LAST) * 4)


def _after_backward(*, offload: str, replicas: int, master: int = 4) -> tuple[DeviceMemory, DeviceMemory]:
    """Returns the memory at the end of a unit's backward, and of the whole."""
    scenario = make_scenario(_PLAIN | {"offload": offload})
    setup = RoleSetup(role="actor", scenario=scenario, shard_ranks=2, replicas=replicas, dtypes=Dtypes(master=master))
    timeline = Timeline()
    replay = Fsdp2Replay(timeline, setup)
    replay.prepare_backward(_UNIT, None)
    gradients = sum(round_up(numel * 2) for numel in _UNIT.originals)
    timeline.allocate("gradients", gradients)
    replay.post_backward(_UNIT, gradients)
    of_unit = timeline.end_stage()
    replay.end_backward()
    return of_unit, timeline.end_stage()


def test_the_last_gradient_of_a_unit_is_there_until_it_is_reduced() -> None:
    of_unit, _ = _after_backward(offload="policy", replicas=1)
    assert of_unit.peak == _INPUT + _FP32_SUM + round_up(_LAST * 2)


@pytest.mark.parametrize(
    ("offload", "master", "kept"), [("policy", 4, 1), ("policy", 2, 1), ("none", 2, 1), ("none", 4, 0)]
)
def test_what_replicas_add_up_is_kept_until_the_backward_is_over(offload: str, master: int, kept: int) -> None:
    alone, end_alone = _after_backward(offload=offload, replicas=1, master=master)
    added_up, end = _after_backward(offload=offload, replicas=2, master=master)
    assert added_up.allocated - alone.allocated == kept * _FP32_SUM
    assert end.held == end_alone.held


def test_a_unit_whose_parameters_are_all_in_others_is_reduced_without_any() -> None:
    setup = RoleSetup(role="actor", scenario=make_scenario(_PLAIN), shard_ranks=2)
    timeline = Timeline()
    Fsdp2Replay(timeline, setup).post_backward(UnitShard(name="root", padded=(), local=(), full=(), originals=()), 0)
    assert timeline.end_stage().peak == 0


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp1-orig"])
def test_an_offload_of_unsharded_fsdp1_frees_only_what_is_cast_to_compute(strategy: str) -> None:
    held = {}
    for master in (BF16, 4):
        scenario = make_scenario({"strategy": strategy, "offload": "param", "staging": "staged"})
        setup = RoleSetup(role="actor", scenario=scenario, shard_ranks=1, length=16, dtypes=Dtypes(master=master))
        stages = {memory.stage: memory.device for memory in _PREDICTOR("small").predict_stages(setup) if memory.device}
        whole = stages["trained"].held["parameters"]
        held[master] = [
            sum(stages[stage].held.get(part, 0) for part in ("parameters", "unsharded parameters")) / whole
            for stage in ("offloaded", "staged", "offloaded again", "loaded", "trained again")
        ]
    assert held == {BF16: [1, 2, 1, 2, 1], 4: [0, 1, 0, 1, 1]}
