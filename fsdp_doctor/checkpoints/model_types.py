"""Tensor names that common model types have in their layers. Using them does not import transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class LayerMarks(NamedTuple):
    """Tensor names that identify a model type: names that all its layers have, and names that only other types have."""

    needed: tuple[re.Pattern[str], ...]
    foreign: tuple[re.Pattern[str], ...] = ()


_QUERIES, _HEAD_NORM, _BIAS = r"self_attn\.q_proj\.weight", r"self_attn\.q_norm\.weight", r"self_attn\.q_proj\.bias"
_EXPERTS = r"experts\."
# Needed and foreign names for each model type, taken from the classes of transformers 4.57 and 5.23 on the meta device.
# tests/checkpoints/test_classes_of_transformers.py compares them with the installed classes.
LAYER_MARKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
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


# Model types without a norm after the last layer, because each layer has its norms after its parts.
_NORMS_WITHIN = frozenset({"bert", "roberta", "opt"})


def find_marks(config: Mapping[str, Any]) -> LayerMarks | None:
    """Finds the marks for the model type in a config.json; None if it is unknown or has its own code."""
    if "auto_map" in config or (found := LAYER_MARKS.get(str(config.get("model_type")))) is None:
        return None
    needed, foreign = found
    if config.get("attention_bias"):
        foreign = tuple(mark for mark in foreign if mark != _BIAS)
    return LayerMarks(tuple(map(re.compile, needed)), tuple(map(re.compile, foreign)))


def has_last_norm(config: Mapping[str, Any]) -> bool:
    """Returns whether the model type in a config.json is known to have a norm after its last layer."""
    return find_marks(config) is not None and config.get("model_type") not in _NORMS_WITHIN
