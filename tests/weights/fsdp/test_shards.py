"""Tests which part of a tensor a rank holds: against torch.chunk, mesh dim by mesh dim."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_doctor.weights.fsdp.shards import LayoutError, compute_part

_FULL = torch.arange(7 * 10).view(7, 10)
_PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2))


def _chunk(tensor: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor:
    chunks = tensor.chunk(count, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def _expected(placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], place: tuple[int, ...]) -> torch.Tensor:
    tensor = _FULL
    for placement, size, index in zip(placements, mesh_shape, place, strict=True):
        if isinstance(placement, _StridedShard):
            stretches = [_chunk(tensor, 0, 2, i) for i in range(2)]
            tensor = torch.cat([_chunk(stretch, 0, size, index) for stretch in stretches])
        elif isinstance(placement, Shard):
            tensor = _chunk(tensor, placement.dim, size, index)
    return tensor


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (9,), (2, 2), (2, 3), (2, 1, 2)])
def test_every_rank_reads_and_writes_what_torch_gives_it(mesh_shape: tuple[int, ...]) -> None:
    mesh = torch.arange(torch.Size(mesh_shape).numel()).view(mesh_shape)
    for placements in itertools.product(_PLACEMENTS, repeat=len(mesh_shape)):
        joined = torch.full_like(_FULL, -1)
        for rank in range(mesh.numel()):
            place = tuple((mesh == rank).nonzero()[0].tolist())
            expected = _expected(placements, mesh_shape, place)
            part = compute_part(rank, _FULL.shape, mesh, placements)
            assert part.shape == expected.shape, (placements, rank)
            assert torch.equal(part.read(_FULL), expected), (placements, rank)
            part.write(joined, expected.reshape(-1))
            stretches = part.list_stretches(_FULL.shape)
            flat = [_FULL.view(-1)[s.first + i * s.step :][: s.length] for s in stretches for i in range(s.rows)]
            assert torch.equal(torch.cat([*flat, _FULL.new_empty(0)]), expected.reshape(-1)), (placements, rank)
        assert torch.equal(joined, _FULL), placements


def test_fully_shard_gives_each_rank_one_block_of_a_tensor_parallel_weight() -> None:
    mesh = torch.arange(4).view(2, 2)
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    full = torch.arange(8)
    held = [compute_part(rank, full.shape, mesh, placements).read(full) for rank in range(4)]
    assert [shard.tolist() for shard in held] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert all(shard.untyped_storage().data_ptr() == full.untyped_storage().data_ptr() for shard in held)


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    assert compute_part(5, (4, 3), torch.arange(2), (Shard(0),)).shape.numel() == 0


def test_a_scalar_is_held_whole() -> None:
    assert compute_part(1, (), torch.arange(2), (Replicate(),)).read(torch.tensor(3.0)).item() == 3.0


def test_a_placement_that_divides_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="is not divided into shards"):
        compute_part(0, (4,), torch.arange(2), (Partial(),))
