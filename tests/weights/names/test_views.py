"""Parts of tensors: where they lie, what of them a shard has, and whether they cover a tensor once."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_doctor.weights.fsdp.shards import compute_part
from fsdp_doctor.weights.fsdp.strides import compute_row_major_strides
from fsdp_doctor.weights.names import NamesError, TensorView
from fsdp_doctor.weights.names.views import check_one_to_one, find_box

SHAPE = (4, 6, 5)
_PLACEMENTS: list[tuple[Placement, ...]] = [
    *itertools.product([Shard(0), Shard(1), Shard(2), Replicate()], repeat=2),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (_StridedShard(1, split_factor=2), Shard(1)),
]


def _random_view(numbers: random.Random) -> TensorView:
    """Ranges of the dims of a tensor of SHAPE, in some order, without some of those of length 1."""
    begins = [numbers.randrange(length) for length in SHAPE]
    lengths = [numbers.randint(1, whole - begin) for whole, begin in zip(SHAPE, begins, strict=True)]
    steps = compute_row_major_strides(SHAPE)
    dims = [dim for dim, length in enumerate(lengths) if length > 1 or numbers.random() < 0.5]
    numbers.shuffle(dims)
    offset = sum(begin * step for begin, step in zip(begins, steps, strict=True))
    return TensorView("t", tuple(lengths[dim] for dim in dims), tuple(steps[dim] for dim in dims), offset)


def test_a_shard_has_of_a_part_the_elements_that_are_in_both() -> None:
    numbers = random.Random(0)
    full = torch.arange(math.prod(SHAPE)).view(SHAPE)
    mesh = torch.arange(4).view(2, 2)
    for _ in range(100):
        view = _random_view(numbers)
        part = view.read(full)
        box = find_box(view, SHAPE)
        assert box is not None, view
        for placements, rank in itertools.product(_PLACEMENTS, range(4)):
            held = compute_part(rank, SHAPE, mesh, placements)
            shard = held.read(full).reshape(held.shape)
            cut, places = box.cut(held)
            in_shard = shard[places]
            assert torch.equal(cut.read(box.arrange(part)).reshape(cut.shape), in_shard), (view, placements, rank)
            assert {*in_shard.flatten().tolist()} == {*shard.flatten().tolist()} & {*part.flatten().tolist()}


def test_a_part_of_other_dims_with_consecutive_elements_is_a_box() -> None:
    reshaped = TensorView("t", (2, 3, 2, 5), (30, 10, 5, 1), 30)
    box = find_box(reshaped, SHAPE)
    assert box is not None
    assert (box.begins, box.lengths) == ((1, 0, 0), (2, 6, 5))
    for none in (((15,), (1,), 20), ((3,), (2,), 0), ((7,), (1,), 0), ((5,), (1,), 118), ((2, 2), (30, 30), 0)):
        assert find_box(TensorView("t", *none), SHAPE) is None, none


def test_an_empty_tensor_and_a_scalar_are_parts_of_themselves() -> None:
    shapes: list[tuple[int, ...]] = [(), (0, 4), (1, 1)]
    for shape in shapes:
        check_one_to_one({"hub": TensorView("t", shape, compute_row_major_strides(shape), 0)}, {"t": shape})


_HALVES = {"a": TensorView("t", (2, 6, 5), (30, 5, 1), 0), "b": TensorView("t", (2, 6, 5), (30, 5, 1), 60)}
_UPPER = {"c": TensorView("t", (4, 3, 5), (30, 5, 1), 0), "d": TensorView("t", (4, 3, 5), (30, 5, 1), 15)}


@pytest.mark.parametrize("views", [_HALVES, _UPPER], ids=["rows", "columns"])
def test_parts_that_cover_a_tensor_once_are_one_to_one(views: dict[str, TensorView]) -> None:
    check_one_to_one(views, {"t": SHAPE})


@pytest.mark.parametrize(
    ("views", "named"),
    [
        ({"a": _HALVES["a"]}, "t"),
        ({**_HALVES, "again": _HALVES["a"]}, "t"),
        ({**_HALVES, "c": _UPPER["c"]}, "t"),
        ({"a": _HALVES["a"], "c": _UPPER["c"]}, "t"),
        ({**_HALVES, "stranger": _HALVES["a"]._replace(name="other")}, "stranger"),
        ({"a": _HALVES["a"], "b": _HALVES["b"]._replace(offset=61)}, "b"),
    ],
    ids=["a gap", "twice", "overlap", "overlap of as many", "of no tensor", "outside"],
)
def test_a_mapping_that_is_not_one_to_one_is_refused_with_names(views: dict[str, TensorView], named: str) -> None:
    with pytest.raises(NamesError, match=rf"one-to-one.*\b{named} is"):
        check_one_to_one(views, {"t": SHAPE})
