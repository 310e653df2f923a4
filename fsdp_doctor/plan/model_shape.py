"""The parameters of a model by FSDP unit, without weights: it is built on the meta device from its configuration."""

from __future__ import annotations

import math
import pathlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_doctor.case import models
from fsdp_doctor.errors import UsageError, first_line
from fsdp_doctor.plan.named_shapes import MODEL_SHAPES


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


def on_meta(model: str, layers: int | None = None) -> nn.Module:
    """The model, in bfloat16, on the meta device.

    model: a name of MODEL_SHAPES, or a directory with a config.json. layers: instead of the model's own number.
    Raises UsageError for any other name, and for what transformers cannot build.
    """
    config = _config(model)
    if layers is not None:
        config.num_hidden_layers = layers
        for name in ("layer_types", "mlp_layer_types"):
            if kinds := getattr(config, name, None):
                setattr(config, name, [kinds[at % len(kinds)] for at in range(layers)])
    import transformers

    try:
        with torch.device("meta"):
            built = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa", trust_remote_code=False
            )
    except Exception as error:
        raise UsageError(f"the model {model}: transformers cannot build it: {first_line(error)}") from None
    assert isinstance(built, nn.Module)
    return built.train()


def shape_of(model: nn.Module, name: str) -> ModelShape:
    """As :func:`fsdp_doctor.case.sharding` shards it."""
    layers = models.decoder_layers(model)
    if not layers:
        raise UsageError(f"the model {name}: it does not say which of its modules are its decoder layers")
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


def _config(model: str) -> Any:
    import transformers

    if model in MODEL_SHAPES:
        kind, sizes = MODEL_SHAPES[model]
        if not hasattr(transformers, kind):
            raise UsageError(f"the model {model}: transformers {transformers.__version__} has no {kind}")
        return getattr(transformers, kind)(**sizes)
    try:
        return transformers.AutoConfig.from_pretrained(pathlib.Path(model).expanduser(), trust_remote_code=False)
    except Exception as error:
        raise UsageError(f"the model {model}: transformers cannot read its config.json: {first_line(error)}") from None
