"""Shapes of models by name, for estimates that need a model's size but no weights."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec

# By name, the arguments of a configuration of transformers; ``config`` is its class.
MODEL_SHAPES: dict[str, dict[str, Any]] = msgspec.toml.decode(
    pathlib.Path(__file__).with_name("model_shapes.toml").read_bytes()
)
