"""Classes of models that transformers has, found without importing it."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class LayerMarks(NamedTuple):
    """Names of tensors in a layer, by which model types are told apart: those that it has, and those of others."""

    needed: tuple[re.Pattern[str], ...]
    foreign: tuple[re.Pattern[str], ...] = ()


_QUERIES, _HEAD_NORM, _BIAS = r"self_attn\.q_proj\.weight", r"self_attn\.q_norm\.weight", r"self_attn\.q_proj\.bias"
_EXPERTS = r"experts\."
# By model type: the needed and the foreign. Read off the classes of transformers 4.57 and 5.23, on the meta device;
# tests/checkpoints/test_model_types.py compares them with those that are installed.
_MARKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama": ((_QUERIES,), (_HEAD_NORM, _EXPERTS)),
    "mistral": ((_QUERIES,), (_HEAD_NORM, _BIAS, _EXPERTS)),
    "qwen2": ((_QUERIES, _BIAS), (_HEAD_NORM, _EXPERTS)),
    "qwen3": ((_QUERIES, _HEAD_NORM), (_EXPERTS,)),
    "mixtral": ((_QUERIES, _EXPERTS), (_HEAD_NORM, _BIAS)),
    "qwen2_moe": ((_QUERIES, _BIAS), (_HEAD_NORM,)),
    "qwen3_moe": ((_QUERIES, _HEAD_NORM), ()),
    "olmo2": ((_QUERIES, _HEAD_NORM), ()),
    "gemma": ((_QUERIES,), (_HEAD_NORM, r"pre_feedforward_layernorm")),
    "gemma2": ((_QUERIES, r"pre_feedforward_layernorm\.weight"), (_HEAD_NORM,)),
    "gemma3_text": ((_QUERIES, r"pre_feedforward_layernorm\.weight", _HEAD_NORM), ()),
    "phi3": ((r"self_attn\.qkv_proj\.weight",), ()),
    "gpt2": ((r"attn\.c_attn\.weight",), (_QUERIES,)),
    "gpt_neox": ((r"attention\.query_key_value\.weight",), (_QUERIES,)),
    "opt": ((_QUERIES, r"fc1\.weight"), (_HEAD_NORM,)),
    "bloom": ((r"self_attention\.query_key_value\.weight",), (_QUERIES,)),
    "falcon": ((r"self_attention\.query_key_value\.weight",), (_QUERIES,)),
    "bert": ((r"attention\.self\.query\.weight",), (_QUERIES,)),
    "roberta": ((r"attention\.self\.query\.weight",), (_QUERIES,)),
}


def find_marks(config: Mapping[str, Any]) -> LayerMarks | None:
    """Finds the marks of the model type of a config.json; None if there are none of it."""
    if "auto_map" in config or (found := _MARKS.get(str(config.get("model_type")))) is None:
        return None
    needed, foreign = found
    if config.get("attention_bias"):
        foreign = tuple(mark for mark in foreign if mark != _BIAS)
    return LayerMarks(tuple(map(re.compile, needed)), tuple(map(re.compile, foreign)))


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
