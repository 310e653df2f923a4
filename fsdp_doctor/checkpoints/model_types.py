"""Classes of models that transformers has, found without importing it."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any


def knows_model(config: Mapping[str, Any]) -> bool:
    """Returns whether transformers has the model type of a config.json; without transformers, as far as is known."""
    model_type = str(config.get("model_type", ""))
    names = _list_model_types()
    return "auto_map" not in config and (not names or model_type.replace("-", "_") in names)


@functools.cache
def _list_model_types() -> frozenset[str]:
    """The names of its directories of models."""
    spec = importlib.util.find_spec("transformers")
    places = spec.submodule_search_locations if spec is not None else None
    models = pathlib.Path(next(iter(places or [""]))) / "models"
    return frozenset(each.name for each in models.iterdir() if each.is_dir()) if models.is_dir() else frozenset()
