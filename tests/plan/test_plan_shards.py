"""What one rank has of a unit, and what it takes on the host."""

from __future__ import annotations

import torch

from fsdp_doctor.ledgers.ledger import power_of_two, rounded
from fsdp_doctor.matrix.axes import Strategy
from fsdp_doctor.plan.meta_model import ModelShape, ShapedParameter, ShapedUnit
from fsdp_doctor.plan.training_step import Timeline, shard_units

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


def test_fsdp1_has_one_flat_parameter_of_each_unit_and_the_embedding_in_the_root() -> None:
    shards = shard_units(SHAPE, Strategy.FSDP1, rank=1, ranks=2)
    assert shards.embedding is None
    assert (shards.root.padded, shards.layers[0].padded) == ((16,), (12,))


def test_the_parts_of_the_original_parameters_add_up_over_the_ranks_of_fsdp1() -> None:
    parts = [shard_units(SHAPE, Strategy.FSDP1_ORIG, rank=rank, ranks=3).layers[0].local for rank in range(3)]
    assert [sum(column) for column in zip(*parts, strict=True)] == [20, 3]


def test_more_ranks_than_rows_multiply_what_a_gather_fills() -> None:
    (layer,) = shard_units(SHAPE, Strategy.FSDP2, rank=0, ranks=64).layers
    assert layer.full == (64 * 4, 64)


def test_a_pinned_tensor_takes_the_next_power_of_two() -> None:
    sizes = (0, 1, 512, 513, 1 << 20, (1 << 20) + 1)
    assert [power_of_two(nbytes) for nbytes in sizes] == [0, 1, 512, 1024, 1 << 20, 2 << 20]


def test_the_highest_moment_of_a_stage_is_kept_by_class_and_the_next_stage_begins_with_what_is_held() -> None:
    timeline = Timeline()
    timeline.allocate("parameters", 512)
    with timeline.allocated("activations", 1024):
        pass
    first = timeline.end_stage()
    assert (first.held, first.at_peak) == ({"parameters": 512}, {"parameters": 512, "activations": 1024})
    assert timeline.end_stage().peak == 512
    assert [rounded(nbytes) for nbytes in (0, 1, 512, 513)] == [0, 512, 512, 1024]
