"""Shapes of models by name, from ``model_shapes.toml``. Read without torch."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# More would take too long: each layer is made, and its forward followed.
MOST_LAYERS = 1000
# By name, the arguments of a configuration of transformers; ``config`` is its class.
MODEL_SHAPES: dict[str, dict[str, Any]] = tomllib.loads(
    pathlib.Path(__file__).with_name("model_shapes.toml").read_text(encoding="utf-8")
)
