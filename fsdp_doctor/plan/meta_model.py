"""A model without weights: transformers builds it from its configuration on the meta device."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdp_doctor.case import models
from fsdp_doctor.errors import UsageError
from fsdp_doctor.plan import fused_attention
from fsdp_doctor.plan.named_shapes import MODEL_SHAPES, MOST_LAYERS
from fsdp_doctor.plan.role_setup import ModelHead

# The first that the model has: torch's, another fused kernel, and what the model itself computes.
_ATTENTION = ("sdpa", fused_attention.IMPLEMENTATION, "eager")


def on_meta(
    model: str, layers: int | None = None, head: ModelHead = "language", dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """Builds the model on the meta device.

    model: a name of MODEL_SHAPES, or a directory with a config.json. layers: instead of the model's own number.
    dtype: of its parameters. Raises UsageError for any other name, and for a model that transformers cannot build.
    """
    with without_warnings():
        config = _config(model)
        number = getattr(config.get_text_config(), "num_hidden_layers", None)
        if layers is None and isinstance(number, int) and number > MOST_LAYERS:
            raise UsageError(f"the model {model}: it has {number} layers, and at most {MOST_LAYERS} are planned")
        if layers is not None:
            _set_layers(config.get_text_config(), layers)
        try:
            with torch.device("meta"):
                built = _built(config, head, dtype)
        except Exception as error:
            raise UsageError(f"the model {model}: transformers cannot build it: {_first_sentence(error)}") from None
        return built.train()


def learned_positions(model: Any) -> int | None:
    """How many positions a model has that looks them up in a table of parameters, which has no row for any other.

    OPT and BioGPT keep two rows more than they have positions.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tables = {module for module in _decoder(model).modules() if isinstance(module, nn.Embedding)}
    rows = {table.num_embeddings for table in tables if table is not models.input_embedding(model)}
    return positions if isinstance(positions, int) and {positions, positions + 2} & rows else None


def followed_layers(model: Any) -> dict[int, nn.Module]:
    """The decoder layers that tokens go through, each with its number among all: not those of a tower for images."""
    layers = models.decoder_layers(model)
    inside = set(_decoder(model).modules())
    return {at: layer for at, layer in enumerate(layers) if layer in inside} or dict(enumerate(layers))


def _decoder(model: Any) -> nn.Module:
    decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model
    return decoder


def checkpoint_layers(model: Any) -> None:
    """Layer by layer, in place."""
    body = model.body if isinstance(model, ValueModel) else model
    enable = getattr(body, "activation_checkpointing_enable", None) or body.gradient_checkpointing_enable
    enable()


class ValueModel(nn.Module):
    """A critic: a head of one output, whose loss is that of a value for each token."""

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


def _config(model: str) -> Any:
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
            f"the model {model}: transformers cannot read its config.json: {_first_sentence(error)}"
        ) from None


def _set_layers(config: Any, layers: int) -> None:
    config.num_hidden_layers = layers
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(config, name, None):
            # Jamba's and Mamba's are no settings: they follow from the number of layers.
            with contextlib.suppress(AttributeError):
                setattr(config, name, [kinds[at % len(kinds)] for at in range(layers)])


def _built(config: Any, head: ModelHead, dtype: torch.dtype) -> nn.Module:
    import transformers

    fused_attention.register()
    auto = transformers.AutoModelForCausalLM
    if head == "value":
        auto = transformers.AutoModel
    elif type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto = transformers.AutoModelForImageTextToText
    elif type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"it has no language model of type {config.model_type}")
    built = _with_attention(auto, config, dtype)
    return ValueModel(built) if head == "value" else built


def _with_attention(auto: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    build = functools.partial(auto.from_config, config, dtype=dtype, trust_remote_code=False)
    for implementation in _ATTENTION[:-1]:
        with contextlib.suppress(ValueError, ImportError):
            return cast(nn.Module, build(attn_implementation=implementation))
    return cast(nn.Module, build(attn_implementation=_ATTENTION[-1]))


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Transformers warns of what matters to a model that has weights."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _first_sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = " ".join(map(str.strip, lines[:2])) if lines[0].endswith(":") else lines[0]
    return said.partition(". ")[0].rstrip(".")
