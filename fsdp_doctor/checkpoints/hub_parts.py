"""Converts between a model's tensors and the tensors of Hugging Face Hub files, which are blocks of model tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from fsdp_doctor.checkpoints.files import BadFile
from fsdp_doctor.checkpoints.record import SavedPiece, SavedTensor, Shape
from fsdp_doctor.text import join_some


class HubPart(NamedTuple):
    """A tensor of the Hub's files, described as a block of a model tensor with the shape ``whole``.

    ``dims`` gives, for each dim of ``shape``, the matching dim of the model tensor, or -1 for a dim of length 1 that
    the model tensor lacks. ``dims`` is None if the dims do not correspond although the elements have the same order.
    """

    tensor: str
    whole: Shape
    begins: Shape
    lengths: Shape
    dims: Shape | None
    shape: Shape

    @property
    def is_whole(self) -> bool:
        """Returns whether the tensors differ only in their names."""
        return self.lengths == self.whole and self.dims == tuple(range(len(self.whole)))

    def check(self, tensor: SavedTensor, expected: Shape) -> Shape:
        """Returns ``dims`` if the tensor can be converted.

        Raises BadFile if the dims do not correspond, or if the tensor's shape is not the one that config.json implies.
        """
        if self.dims is None:
            raise BadFile(
                "has different dims under the Hub's name; a conversion between them is not supported: use --keep-names",
                tensor.name,
            )
        if tensor.shape != expected:
            raise BadFile(f"is {list(tensor.shape)}, but must be {list(expected)} by config.json", tensor.name)
        return self.dims


def split_for_hub(tensors: Mapping[str, SavedTensor], parts: Mapping[str, HubPart]) -> dict[str, SavedTensor]:
    """Splits the model's tensors into the tensors that ``save_pretrained`` would write.

    Tensors that have Hub names already are not changed.

    Raises BadFile for a tensor that does not fit the configuration.
    """
    parts_of = _group(parts)
    split: dict[str, SavedTensor] = {}
    for name, tensor in tensors.items():
        for hub_name in parts_of.get(name, [name]):
            if hub_name in split:
                raise BadFile("is present under the model's name and under the Hub's", hub_name)
            split[hub_name] = _cut(tensor, hub_name, parts[hub_name]) if name in parts_of else tensor
    return split


def join_from_hub(tensors: Mapping[str, SavedTensor], parts: Mapping[str, HubPart]) -> dict[str, SavedTensor]:
    """Joins tensors of Hub files into the tensors of the model; other tensors stay as they are.

    Raises BadFile if a part is missing, or if a tensor does not fit the configuration.
    """
    parts_of = _group(parts)
    joined: dict[str, SavedTensor] = {}
    for name, tensor in tensors.items():
        model_name = parts[name].tensor if name in parts else name
        if name in parts and name != next(each for each in parts_of[model_name] if each in tensors):
            continue  # added together with the first part that exists
        if model_name in joined:
            raise BadFile("is present under the model's name and under the Hub's", model_name)
        if name in parts and (missing := [each for each in parts_of[model_name] if each not in tensors]):
            raise BadFile(f"lacks {join_some(missing)}, which would become {model_name}")
        joined[model_name] = _join(tensors, parts_of[model_name], parts) if name in parts else tensor
    return joined


def _group(parts: Mapping[str, HubPart]) -> dict[str, list[str]]:
    """Groups the Hub's names by the model's name."""
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
        sides = zip(piece.offsets, piece.shape, part.begins, part.lengths, strict=True)
        common = [range(max(first, begin), min(first + n, begin + m)) for first, n, begin, m in sides]
        if not all(common):
            continue
        skipped = zip(common, piece.offsets, piece.strides, strict=True)
        nbytes = sum((of_both.start - first) * stride for of_both, first, stride in skipped) * tensor.itemsize
        cut.pieces.append(
            piece._replace(
                begin=piece.begin + nbytes if piece.begin >= 0 else -1,
                shape=tuple(len(common[dim]) if dim >= 0 else 1 for dim in dims),
                offsets=tuple(common[dim].start - part.begins[dim] if dim >= 0 else 0 for dim in dims),
                strides=tuple(piece.strides[dim] if dim >= 0 else 1 for dim in dims),
            )
        )
    return cut


def _join(tensors: Mapping[str, SavedTensor], names: list[str], parts: Mapping[str, HubPart]) -> SavedTensor:
    first, of_first = tensors[names[0]], parts[names[0]]
    if of_first.is_whole:
        return SavedTensor((of_first.tensor,), first.dtype, first.shape, first.pieces)
    joined = SavedTensor((of_first.tensor,), first.dtype, of_first.whole)
    for name in names:
        if tensors[name].dtype != first.dtype:
            raise BadFile(
                f"is {tensors[name].dtype}, but {names[0]}, a part of the same tensor, is {first.dtype}", name
            )
        joined.pieces += [_place(piece, parts[name], tensors[name]) for piece in tensors[name].pieces]
    return joined


def _place(piece: SavedPiece, part: HubPart, tensor: SavedTensor) -> SavedPiece:
    """Converts a piece of a part to a piece of the whole tensor."""
    dims = part.check(tensor, part.shape)
    offsets, shape, strides = list(part.begins), [1] * len(part.whole), [1] * len(part.whole)
    for at, dim in enumerate(dims):
        if dim >= 0:
            offsets[dim] += piece.offsets[at]
            shape[dim], strides[dim] = piece.shape[at], piece.strides[at]
    return piece._replace(shape=tuple(shape), offsets=tuple(offsets), strides=tuple(strides))
