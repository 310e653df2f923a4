"""The parameters of a model by FSDP unit, without weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from fsdp_doctor.case import models
from fsdp_doctor.errors import UsageError


@dataclass(frozen=True)
class ShapedParameter:
    """A parameter's first name, and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShapedUnit:
    """What FSDP gathers at once: a decoder layer, an untied embedding, or the root with all that is left."""

    name: str
    parameters: tuple[ShapedParameter, ...]

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model without its weights.

    layers: the units of the decoder layers, in order. embedding: the input embedding, unless it is tied to the head
    and so the root's. root: all other parameters. buffer_bytes: each of its buffers, which no FSDP shards.
    """

    name: str
    layers: tuple[ShapedUnit, ...]
    embedding: ShapedUnit | None
    root: ShapedUnit
    buffer_bytes: tuple[int, ...]

    @property
    def units(self) -> tuple[ShapedUnit, ...]:
        """In the order of a forward, the root first."""
        return (self.root, *((self.embedding,) if self.embedding else ()), *self.layers)

    @property
    def parameters(self) -> tuple[ShapedParameter, ...]:
        return tuple(parameter for unit in self.units for parameter in unit.parameters)

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)


def shape_of(model: nn.Module, name: str) -> ModelShape:
    """As :func:`fsdp_doctor.case.sharding` shards it."""
    layers = models.decoder_layers(model)
    if not layers:
        raise UsageError(f"the model {name}: it has no decoder layers, or does not say which of its modules they are")
    embedding = models.input_embedding(model)
    taken: set[int] = set()
    units = [_unit(f"layer {at}", layer, taken) for at, layer in enumerate(layers)]
    of_embedding = _unit("embedding", embedding, taken) if embedding is not None else None
    return ModelShape(
        name=name,
        layers=tuple(units),
        embedding=of_embedding,
        root=_unit("root", model, taken),
        buffer_bytes=tuple(buffer.nbytes for buffer in model.buffers()),
    )


def _unit(name: str, module: nn.Module, taken: set[int]) -> ShapedUnit:
    """With its parameters that are not yet in another unit."""
    found = [(key, tensor) for key, tensor in module.named_parameters() if id(tensor) not in taken]
    taken.update(id(tensor) for _, tensor in found)
    return ShapedUnit(name, tuple(ShapedParameter(key, tuple(tensor.shape)) for key, tensor in found))
