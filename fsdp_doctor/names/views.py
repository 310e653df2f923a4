"""A tensor as a part of another: a box of its indices, of which a rank's shard has a smaller box."""

from __future__ import annotations

import bisect
import collections
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fsdp_doctor.errors import some
from fsdp_doctor.fsdp.shards import HeldPart, Slices, row_major

_MOST_NAMES = 10


class NamesError(ValueError):
    """Names that a model's tensors cannot be given; the message says which, and why."""


class TensorView(NamedTuple):
    """``as_strided(shape, stride, offset)`` of the model's tensor of that name, as if that were contiguous."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Whether it is the tensor of that shape as it is."""
        return self.shape == tuple(shape) and not self.offset and (self.is_contiguous or not math.prod(shape))

    @property
    def is_contiguous(self) -> bool:
        steps = zip(self.shape, self.stride, row_major(self.shape), strict=True)
        return all(step == wanted for length, step, wanted in steps if length > 1)

    def read(self, full: torch.Tensor) -> torch.Tensor:
        """The part of the full tensor; a view, unless that is not contiguous."""
        return full if self.is_whole(full.shape) else full.contiguous().as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Box:
    """The indices ``[begin, begin + length)`` of each dim of a tensor, which are those of a view.

    order: the view's dims in the order of the tensor's.
    """

    begins: tuple[int, ...]
    lengths: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def is_in_order(self) -> bool:
        """Whether the view's elements follow one another as the tensor's do."""
        return self.order == tuple(range(len(self.order)))

    def arrange(self, view: torch.Tensor) -> torch.Tensor:
        """The view with the tensor's dims."""
        return view.permute(self.order).reshape(self.lengths)

    def cut(self, held: HeldPart) -> tuple[HeldPart, Slices]:
        """What a rank has of the box: as indices of the box, and in the rank's shard. held: its part of the tensor."""
        runs, places = [], []
        for begin, length, parts in zip(self.begins, self.lengths, held.runs, strict=True):
            # Of a rising sequence of indices those in the box follow one another.
            inside = [range(max(run.start, begin), min(run.stop, begin + length)) for run in parts]
            runs.append(tuple(range(r.start - begin, r.stop - begin) for r in inside if len(r)) or (range(0),))
            first = sum(len(range(run.start, min(run.stop, begin))) for run in parts)
            places.append(slice(first, first + sum(map(len, inside))))
        return HeldPart(tuple(runs)), tuple(places)


def find_box(view: TensorView, shape: Sequence[int]) -> Box | None:
    """Where the view lies in a tensor of that shape; None for one that is no box of it, or not in it."""
    same_order = tuple(range(len(view.shape)))
    if view.is_whole(shape):
        return Box((0,) * len(shape), view.shape, same_order)
    strides, numel = row_major(shape), math.prod(view.shape)
    if not numel or not math.prod(shape) or view.offset < 0 or len(view.shape) != len(view.stride):
        return None
    begins, rest = [], view.offset
    for stride in strides:
        begin, rest = divmod(rest, stride)
        begins.append(begin)
    if view.is_contiguous:
        lengths = [max(min(numel // stride, length), 1) for stride, length in zip(strides, shape, strict=True)]
        order = same_order
    else:
        lengths, of_dim = [1] * len(shape), {}
        for dim, (length, stride) in enumerate(zip(view.shape, view.stride, strict=True)):
            found = [at for at, step in enumerate(strides) if step == stride and shape[at] > 1]
            if length > 1 and found:
                of_dim[found[0]], lengths[found[0]] = dim, length
        moved = [of_dim[at] for at in sorted(of_dim)]
        order = (*(dim for dim in same_order if dim not in moved), *moved)
    fits = all(b + length <= whole for b, length, whole in zip(begins, lengths, shape, strict=True))
    return Box(tuple(begins), tuple(lengths), order) if fits and math.prod(lengths) == numel else None


def check_one_to_one(views: Mapping[str, TensorView], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises NamesError unless every element of each tensor belongs to one view, and every view lies in a tensor.

    shapes: of the model's tensors, by all of their names.
    """
    boxes: dict[str, list[Box]] = {name: [] for name in shapes}
    wrong: list[str] = []
    for name, view in views.items():
        box = find_box(view, shapes[view.name]) if view.name in shapes else None
        if box is None:
            wrong.append(f"{name} is no part of {view.name}")
        else:
            boxes[view.name].append(box)
    wrong += [f"{name} is not covered once" for name, parts in boxes.items() if not _cover_once(parts, shapes[name])]
    if wrong:
        raise NamesError(f"the names are not one-to-one with the model's tensors: {some(wrong, _MOST_NAMES)}")


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
