"""What this rank holds of the merged weights: what the path that yields shards is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_doctor.case import held_pieces
from fsdp_doctor.case.bitwise import compare
from fsdp_doctor.case.lora_reference import Merged, base_weights, is_adapter
from fsdp_doctor.extract import ShardPlace
from fsdp_doctor.fsdp import reader
from fsdp_doctor.fsdp.names import without_adapters


@dataclass(frozen=True)
class OwnPart:
    """On the host, 1-D. merged: of a weight with an adapter, instead of its values."""

    values: torch.Tensor
    merged: Merged | None

    def difference(self, actual: torch.Tensor, place: ShardPlace, full: torch.Tensor) -> str:
        """How a shard and its place differ from what the rank holds; empty if they do not. full: without adapters."""
        if actual.numel() != self.values.numel():
            return f"a shard of {actual.numel()} elements where this rank holds {self.values.numel()}"
        found = self.merged.difference(actual.reshape(-1)) if self.merged else compare(actual, self.values)
        if found or not compare(place.of(full), self.values):
            return found
        return "its place is not where this rank's elements are"


def own_parts(model: nn.Module, full: Mapping[str, torch.Tensor], merged: Mapping[str, Merged]) -> dict[str, OwnPart]:
    """By the names of the model that peft was given, every tied one too.

    full: every tensor of the sharded model, unsharded, by its unwrapped name.
    """
    plain = _held(model, base_weights(full))
    exact = _held(model, {name: one.exact for name, one in merged.items()})
    bound = _held(model, {name: one.bound for name, one in merged.items()})
    return {
        name: OwnPart(part, Merged(exact[name], bound[name], merged[name].dtype) if name in merged else None)
        for name, part in plain.items()
    }


def _held(model: nn.Module, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of each, 1-D. full: by the names of the model that peft was given."""
    names = [name for every in reader.read(model).all_names() for name in every if not is_adapter(name)]
    by_own_names = {name: full[without_adapters(name)] for name in names if without_adapters(name) in full}
    return {
        without_adapters(name): piece.expected.reshape(-1)
        for piece in held_pieces.of_model(model, by_own_names)
        if piece.expected is not None
        for name in piece.names
        if name in by_own_names
    }
