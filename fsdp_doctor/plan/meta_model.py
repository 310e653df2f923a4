"""Builds models without weights on the meta device, and divides their parameters into FSDP units."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdp_doctor.case import models
from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.model_shapes import MODEL_SHAPES
from fsdp_doctor.plan.job import MOST_LAYERS, ModelHead


@dataclass(frozen=True)
class ShapedParameter:
    """The name and the shape of a parameter; a tied parameter has its first name."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShapedUnit:
    """An FSDP unit: a decoder layer, an untied embedding, or the root with all other parameters."""

    name: str
    parameters: tuple[ShapedParameter, ...]

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model without its weights.

    layers: the units of the decoder layers, in order.
    embedding: the unit of the input embedding; None if the embedding is tied to the head and so belongs to the root.
    root: the unit of all other parameters.
    buffer_bytes: the size of each buffer; neither FSDP1 nor FSDP2 shards buffers.
    """

    name: str
    layers: tuple[ShapedUnit, ...]
    embedding: ShapedUnit | None
    root: ShapedUnit
    buffer_bytes: tuple[int, ...]

    @property
    def units(self) -> tuple[ShapedUnit, ...]:
        """Units in the order of the forward, the root first."""
        return (self.root, *((self.embedding,) if self.embedding else ()), *self.layers)

    @property
    def parameters(self) -> tuple[ShapedParameter, ...]:
        return tuple(parameter for unit in self.units for parameter in unit.parameters)

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)


def read_shape(model: nn.Module, name: str) -> ModelShape:
    """Divides the parameters into FSDP units in the same way as :mod:`fsdp_doctor.case.sharding`.

    Raises UsageError for a model without decoder layers.
    """
    layers = models.find_decoder_layers(model)
    if not layers:
        raise UsageError(
            f"the model {name}: the model has no decoder layers, or does not name its modules that are decoder layers"
        )
    embedding = models.find_input_embedding(model)
    taken: set[int] = set()
    units = [_shape_unit(f"layer {at}", layer, taken) for at, layer in enumerate(layers)]
    of_embedding = _shape_unit("embedding", embedding, taken) if embedding is not None else None
    return ModelShape(
        name=name,
        layers=tuple(units),
        embedding=of_embedding,
        root=_shape_unit("root", model, taken),
        buffer_bytes=tuple(buffer.nbytes for buffer in model.buffers()),
    )


def _shape_unit(name: str, module: nn.Module, taken: set[int]) -> ShapedUnit:
    """Makes a unit of the module's parameters that are not yet in another unit."""
    parameters = [(key, tensor) for key, tensor in module.named_parameters() if id(tensor) not in taken]
    taken.update(id(tensor) for _, tensor in parameters)
    return ShapedUnit(name, tuple(ShapedParameter(key, tuple(tensor.shape)) for key, tensor in parameters))


# As `attn_implementation` of transformers.
_IMPLEMENTATION = "fsdp-doctor-fused"


@contextlib.contextmanager
def fuse_attention() -> Iterator[None]:
    """Replaces torch's ``scaled_dot_product_attention`` within the ``with`` block by a function that only allocates
    memory, like a fused kernel.

    The replacement also acts while the backward recomputes a checkpointed layer.
    """
    original = nn.functional.scaled_dot_product_attention

    def run_fused(query: Tensor, key: Tensor, value: Tensor, *_others: object, **_named: object) -> Any:
        return _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]

    nn.functional.scaled_dot_product_attention = run_fused
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


def _run_fused_attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: object, **_named: object
) -> tuple[Tensor, None]:
    """Imitates the allocations of attention on tensors of shape (sequences, heads, tokens, size).

    The output has the shape (sequences, tokens, heads, size).
    """
    output: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


class _Attention(torch.autograd.Function):
    """Allocates the same tensors as a fused attention kernel.

    The forward saves inputs, output and one float32 sum per row; the backward allocates a float32 accumulator.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sequences, heads, tokens, _ = query.shape
        # The tokens before the heads in memory, so that what joins the heads copies nothing.
        output = query.new_empty(sequences, tokens, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _output, sums = ctx.saved_tensors
        added_up, rows = query.new_empty(query.shape, dtype=torch.float32), sums.new_empty(sums.shape)
        made = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
        del added_up, rows
        return made


# The first that the model supports: torch's, transformers' interface for another kernel, the model's own.
_ATTENTION = ("sdpa", _IMPLEMENTATION, "eager")


def build_on_meta(
    model: str, layers: int | None = None, head: ModelHead = "language", dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """Builds a model on the meta device.

    Raises UsageError for an unknown name, and for a model that transformers cannot build.

    model: a name in MODEL_SHAPES, or a directory with a config.json.
    layers: the number of layers; None for the model's own number.
    dtype: the dtype of the parameters.
    """
    with silence_warnings():
        config = _read_config(model)
        number = getattr(config.get_text_config(), "num_hidden_layers", None)
        if layers is None and isinstance(number, int) and number > MOST_LAYERS:
            raise UsageError(
                f"the model {model}: the model has {number} layers, but at most {MOST_LAYERS} can be planned"
            )
        if layers is not None:
            _set_layers(config.get_text_config(), layers)
        try:
            with torch.device("meta"):
                built = _build(config, head, dtype)
        except Exception as error:
            raise UsageError(
                f"the model {model}: transformers cannot build it: {_read_first_sentence(error)}"
            ) from None
        return built.train()


def count_learned_positions(model: Any) -> int | None:
    """Returns the number of learned position embeddings; None for a model that computes positions for any length.

    The embedding tables of OPT and BioGPT have two more rows than positions.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tables = {module for module in _find_decoder(model).modules() if isinstance(module, nn.Embedding)}
    rows = {table.num_embeddings for table in tables if table is not models.find_input_embedding(model)}
    return positions if isinstance(positions, int) and {positions, positions + 2} & rows else None


def find_followed_layers(model: Any) -> dict[int, nn.Module]:
    """Finds the decoder layers that process tokens, by number; the layers of an image encoder are left out."""
    layers = models.find_decoder_layers(model)
    inside = set(_find_decoder(model).modules())
    return {at: layer for at, layer in enumerate(layers) if layer in inside} or dict(enumerate(layers))


def _find_decoder(model: Any) -> nn.Module:
    decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model
    return decoder


def checkpoint_layers(model: Any) -> None:
    """Switches on activation checkpointing for every layer, in place."""
    body = model.body if isinstance(model, ValueModel) else model
    enable = getattr(body, "activation_checkpointing_enable", None) or body.gradient_checkpointing_enable
    enable()


class ValueModel(nn.Module):
    """A critic: a model body, a head with one output value per token, and a loss on these values."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.config = body.config
        self._no_split_modules = body._no_split_modules
        self.score = nn.Linear(self.config.get_text_config().hidden_size, 1, dtype=torch.bfloat16)

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Any:
        from transformers.modeling_outputs import TokenClassifierOutput

        values = self.score(self.body(input_ids=input_ids, use_cache=use_cache).last_hidden_state).squeeze(-1)
        return TokenClassifierOutput(loss=(values.float() - labels).square().mean(), logits=values)

    def get_input_embeddings(self) -> Any:
        return self.body.get_input_embeddings()

    def get_decoder(self) -> Any:
        return self.body.get_decoder()


def _read_config(model: str) -> Any:
    import transformers

    if model in MODEL_SHAPES:
        arguments = dict(MODEL_SHAPES[model])
        kind = arguments.pop("config")
        if not hasattr(transformers, kind):
            raise UsageError(f"the model {model}: transformers {transformers.__version__} has no {kind}")
        return getattr(transformers, kind)(**arguments)
    try:
        return transformers.AutoConfig.from_pretrained(os.path.expanduser(model), trust_remote_code=False)
    except Exception as error:
        raise UsageError(
            f"the model {model}: transformers cannot read its config.json: {_read_first_sentence(error)}"
        ) from None


def _set_layers(config: Any, layers: int) -> None:
    config.num_hidden_layers = layers
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(config, name, None):
            # Jamba's and Mamba's are no settings: they follow from the number of layers.
            with contextlib.suppress(AttributeError):
                setattr(config, name, [kinds[at % len(kinds)] for at in range(layers)])


def _build(config: Any, head: ModelHead, dtype: torch.dtype) -> nn.Module:
    import transformers

    # Transformers gives an implementation that is registered so no mask.
    transformers.AttentionInterface.register(_IMPLEMENTATION, _run_fused_attention)
    auto = transformers.AutoModelForCausalLM
    if head == "value":
        auto = transformers.AutoModel
    elif type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto = transformers.AutoModelForImageTextToText
    elif type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"it has no language model of type {config.model_type}")
    built = _choose_attention(auto, config, dtype)
    return ValueModel(built) if head == "value" else built


def _choose_attention(auto: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    build = functools.partial(auto.from_config, config, dtype=dtype, trust_remote_code=False)
    for implementation in _ATTENTION[:-1]:
        with contextlib.suppress(ValueError, ImportError):
            return cast(nn.Module, build(attn_implementation=implementation))
    return cast(nn.Module, build(attn_implementation=_ATTENTION[-1]))


@contextlib.contextmanager
def silence_warnings() -> Iterator[None]:
    """Silences warnings of transformers that matter only for a model with weights."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _read_first_sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = " ".join(map(str.strip, lines[:2])) if lines[0].endswith(":") else lines[0]
    return line.partition(". ")[0].rstrip(".")
