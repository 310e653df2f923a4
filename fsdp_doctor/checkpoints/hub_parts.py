"""A model's tensors by the names of the Hub's files, and back: each of these is a block of one of the model's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from fsdp_doctor.checkpoints.files import BadFile
from fsdp_doctor.checkpoints.record import SavedPiece, SavedTensor, Shape
from fsdp_doctor.errors import join_some


class HubPart(NamedTuple):
    """A tensor of the Hub's files as a block of one of the model's, of the shape ``whole``.

    dims: of the model's tensor, for each dim of ``shape``; -1 for one of length 1 that it does not have. None for a
    part whose elements have the same order, and other dims.
    """

    tensor: str
    whole: Shape
    begins: Shape
    lengths: Shape
    dims: Shape | None
    shape: Shape

    @property
    def is_whole(self) -> bool:
        """Whether only the names differ."""
        return self.lengths == self.whole and self.dims == tuple(range(len(self.whole)))

    def check(self, tensor: SavedTensor, expected: Shape) -> Shape:
        """The dims. Raises BadFile for a tensor that has another shape than the model's configuration says."""
        if self.dims is None:
            raise BadFile("has other dims under the Hub's name, which is not converted: say --keep-names", tensor.name)
        if tensor.shape != expected:
            raise BadFile(f"is {list(tensor.shape)}, and by config.json it would be {list(expected)}", tensor.name)
        return self.dims


def split_for_hub(tensors: Mapping[str, SavedTensor], parts: Mapping[str, HubPart]) -> dict[str, SavedTensor]:
    """The tensors by the names that ``save_pretrained`` would give them, those with the Hub's names as they are.

    Raises BadFile for a tensor that the configuration does not describe.
    """
    parts_of = _group(parts)
    split: dict[str, SavedTensor] = {}
    for name, tensor in tensors.items():
        for hub_name in parts_of.get(name, [name]):
            if hub_name in split:
                raise BadFile("is there by the model's name and by the Hub's", hub_name)
            split[hub_name] = _cut(tensor, hub_name, parts[hub_name]) if name in parts_of else tensor
    return split


def join_from_hub(tensors: Mapping[str, SavedTensor], parts: Mapping[str, HubPart]) -> dict[str, SavedTensor]:
    """The tensors by the model's names, those that have them as they are.

    Raises BadFile for a tensor of which a part lacks, or that the configuration does not describe.
    """
    parts_of = _group(parts)
    joined: dict[str, SavedTensor] = {}
    of_parts: set[str] = set()
    for name, tensor in tensors.items():
        model_name = parts[name].tensor if name in parts else name
        if name in parts and model_name in of_parts:
            continue
        if model_name in joined:
            raise BadFile("is there by the model's name and by the Hub's", model_name)
        if name not in parts:
            joined[name] = tensor
            continue
        if missing := [each for each in parts_of[model_name] if each not in tensors]:
            raise BadFile(f"lacks {join_some(missing)}, which is to become {model_name}")
        joined[model_name] = _join(model_name, {each: tensors[each] for each in parts_of[model_name]}, parts)
        of_parts.add(model_name)
    return joined


def _group(parts: Mapping[str, HubPart]) -> dict[str, list[str]]:
    """The Hub's names by the model's."""
    names: dict[str, list[str]] = defaultdict(list)
    for hub_name, part in parts.items():
        names[part.tensor].append(hub_name)
    return names


def _cut(tensor: SavedTensor, hub_name: str, part: HubPart) -> SavedTensor:
    if part.is_whole:
        return SavedTensor((hub_name,), tensor.dtype, tensor.shape, tensor.pieces)
    dims = part.check(tensor, part.whole)
    cut = SavedTensor((hub_name,), tensor.dtype, part.shape)
    for piece in tensor.pieces:
        firsts = [max(each) for each in zip(piece.offsets, part.begins, strict=True)]
        lasts = [
            min(offset + length, begin + of_part)
            for offset, length, begin, of_part in zip(
                piece.offsets, piece.shape, part.begins, part.lengths, strict=True
            )
        ]
        lengths = [last - first for first, last in zip(firsts, lasts, strict=True)]
        if min(lengths) <= 0:
            continue
        skipped = zip(firsts, piece.offsets, piece.strides, strict=True)
        nbytes = sum((first - offset) * stride for first, offset, stride in skipped) * tensor.itemsize
        cut.pieces.append(
            piece._replace(
                begin=piece.begin + nbytes if piece.begin >= 0 else -1,
                shape=tuple(lengths[dim] if dim >= 0 else 1 for dim in dims),
                offsets=tuple(firsts[dim] - part.begins[dim] if dim >= 0 else 0 for dim in dims),
                strides=tuple(piece.strides[dim] if dim >= 0 else 1 for dim in dims),
            )
        )
    return cut


def _join(name: str, tensors: Mapping[str, SavedTensor], parts: Mapping[str, HubPart]) -> SavedTensor:
    first = next(iter(tensors.values()))
    if all(parts[hub_name].is_whole for hub_name in tensors):
        return SavedTensor((name,), first.dtype, first.shape, first.pieces)
    joined = SavedTensor((name,), first.dtype, parts[first.name].whole)
    for hub_name, tensor in tensors.items():
        if tensor.dtype != first.dtype:
            raise BadFile(f"is {tensor.dtype}, and {first.name} is {first.dtype}: both are parts of {name}", hub_name)
        joined.pieces += [_place(piece, parts[hub_name], tensor) for piece in tensor.pieces]
    return joined


def _place(piece: SavedPiece, part: HubPart, tensor: SavedTensor) -> SavedPiece:
    """The piece of a part as one of the whole."""
    dims = part.check(tensor, part.shape)
    offsets, shape, strides = list(part.begins), [1] * len(part.whole), [1] * len(part.whole)
    for at, dim in enumerate(dims):
        if dim >= 0:
            offsets[dim], shape[dim], strides[dim] = (
                offsets[dim] + piece.offsets[at],
                piece.shape[at],
                piece.strides[at],
            )
    return piece._replace(shape=tuple(shape), offsets=tuple(offsets), strides=tuple(strides))
