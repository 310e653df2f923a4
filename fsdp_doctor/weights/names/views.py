"""Views of tensors: a tensor as a box of another tensor's indices. A rank's shard holds a smaller box inside it."""

from __future__ import annotations

import bisect
import collections
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fsdp_doctor.text import join_some
from fsdp_doctor.weights.fsdp.shards import LocalPart, Slices
from fsdp_doctor.weights.fsdp.strides import compute_row_major_strides

_MOST_NAMES = 10


class NamesError(ValueError):
    """Error for names that do not fit the model's tensors. The message says which names, and why."""


class TensorView(NamedTuple):
    """Part of the model's tensor ``name``: ``as_strided(shape, stride, offset)`` of the contiguous tensor."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Returns whether the view is the whole tensor of that shape, unchanged."""
        return self.shape == tuple(shape) and not self.offset and (self.is_contiguous or not math.prod(shape))

    @property
    def is_contiguous(self) -> bool:
        steps = zip(self.shape, self.stride, compute_row_major_strides(self.shape), strict=True)
        return all(step == wanted for length, step, wanted in steps if length > 1)

    def read(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this part of the full tensor: a view of it, or of a copy if the full tensor is not contiguous."""
        return full if self.is_whole(full.shape) else full.contiguous().as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Box:
    """Box of a tensor's indices that a view covers: ``[begin, begin + length)`` along each dim.

    dims: the tensor's dim for each of the view's dims; -1 for a view's dim of length 1; None if the view has other dims
        than the tensor; in this case its elements are in the tensor's order.
    """

    begins: tuple[int, ...]
    lengths: tuple[int, ...]
    dims: tuple[int, ...] | None

    @property
    def is_in_order(self) -> bool:
        """True if the view's elements are in the same order as the tensor's."""
        return self.dims is None or self._order == [*range(len(self.dims))]

    @property
    def _order(self) -> list[int]:
        dims = self.dims or ()
        return sorted(range(len(dims)), key=lambda dim: dims[dim])

    def arrange(self, view: torch.Tensor) -> torch.Tensor:
        """Returns the view with the dims of the tensor, in the tensor's order."""
        return (view if self.dims is None else view.permute(self._order)).reshape(self.lengths)

    def cut(self, part: LocalPart) -> tuple[LocalPart, Slices]:
        """Cuts out the part of the box that a rank holds.

        Returns the part's indices in the box, and its slices in the rank's shard.

        part: the part of the whole tensor that the rank holds.
        """
        runs, places = [], []
        for begin, length, parts in zip(self.begins, self.lengths, part.runs, strict=True):
            # Of a rising sequence of indices those in the box follow one another.
            inside = [range(max(run.start, begin), min(run.stop, begin + length)) for run in parts]
            runs.append(tuple(range(r.start - begin, r.stop - begin) for r in inside if len(r)) or (range(0),))
            first = sum(len(range(run.start, min(run.stop, begin))) for run in parts)
            places.append(slice(first, first + sum(map(len, inside))))
        return LocalPart(tuple(runs)), tuple(places)

    def restore(self, cut: LocalPart, block: torch.Tensor) -> tuple[LocalPart, torch.Tensor]:
        """Returns a rank's part of the box in the view's dims: its indices in the view, and its elements."""
        assert self.dims is not None
        runs = [cut.runs[dim] if dim >= 0 else (range(1),) for dim in self.dims]
        if not cut.shape.numel() and runs:
            runs[0] = (range(0),)
        shape = LocalPart(tuple(runs)).shape
        arranged = block.reshape([shape[dim] for dim in self._order])
        return LocalPart(tuple(runs)), arranged.permute([self._order.index(dim) for dim in range(len(shape))])


def find_box(view: TensorView, shape: Sequence[int]) -> Box | None:
    """Finds the view's box in a tensor of that shape; None if the view is no box, or not inside the tensor."""
    if view.is_whole(shape):
        return Box((0,) * len(shape), view.shape, tuple(range(len(shape))))
    strides, numel = compute_row_major_strides(shape), math.prod(view.shape)
    if not numel or not math.prod(shape) or view.offset < 0 or len(view.shape) != len(view.stride):
        return None
    begins, rest = [], view.offset
    for stride in strides:
        begin, rest = divmod(rest, stride)
        begins.append(begin)
    dims = [
        next((at for at, of_dim in enumerate(strides) if of_dim == step and shape[at] > 1), -1) if length > 1 else -1
        for length, step in zip(view.shape, view.stride, strict=True)
    ]
    lengths = [1] * len(shape)
    for dim, length in zip(dims, view.shape, strict=True):
        if dim >= 0:
            lengths[dim] = length
    box = Box(tuple(begins), tuple(lengths), tuple(dims))
    if view.is_contiguous and not _fits(box, numel, shape):
        in_rows = [max(min(numel // stride, length), 1) for stride, length in zip(strides, shape, strict=True)]
        box = Box(tuple(begins), tuple(in_rows), None)
    return box if _fits(box, numel, shape) else None


def _fits(box: Box, numel: int, shape: Sequence[int]) -> bool:
    ends = (begin + length for begin, length in zip(box.begins, box.lengths, strict=True))
    return math.prod(box.lengths) == numel and all(end <= length for end, length in zip(ends, shape, strict=True))


def check_one_to_one(views: Mapping[str, TensorView], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises NamesError unless every element of each tensor belongs to exactly one view, and every view lies in a
    tensor.

    shapes: the shapes of the model's tensors, by all of their names.
    """
    boxes: dict[str, list[Box]] = {name: [] for name in shapes}
    wrong: list[str] = []
    for name, view in views.items():
        box = find_box(view, shapes[view.name]) if view.name in shapes else None
        if box is None:
            wrong.append(f"{name} is not a part of {view.name}")
        else:
            boxes[view.name].append(box)
    wrong += [
        (f"{name} is not covered exactly once") for name, parts in boxes.items() if not _cover_once(parts, shapes[name])
    ]
    if wrong:
        raise NamesError(f"the names are not one-to-one with the model's tensors: {join_some(wrong, _MOST_NAMES)}")


def _cover_once(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    if len(boxes) == 1:
        return boxes[0].lengths == tuple(shape)
    cuts = [
        sorted({0, length, *(b.begins[dim] for b in boxes), *(b.begins[dim] + b.lengths[dim] for b in boxes)})
        for dim, length in enumerate(shape)
    ]
    cells = collections.Counter(
        cell
        for box in boxes
        for cell in itertools.product(
            *(
                range(bisect.bisect_left(marks, begin), bisect.bisect_left(marks, begin + length))
                for marks, begin, length in zip(cuts, box.begins, box.lengths, strict=True)
            )
        )
    )
    return len(cells) == math.prod(len(marks) - 1 for marks in cuts) and set(cells.values()) <= {1}
