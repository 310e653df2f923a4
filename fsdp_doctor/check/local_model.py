"""What the config.json of a local model directory says: the sizes that FSDP2 shards, and the type of the model."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.matrix.axes import Model

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
)
_LARGEST = 1 << 20
_HEADS = ("num_attention_heads", "num_key_value_heads")
_BUILT_IN: dict[str, Model] = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3-moe",
    "qwen3_5": "qwen3.5",
}


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """sizes: of the first dimension of parameters, which FSDP2 shards. built_in: the matrix's model of that type."""

    sizes: Mapping[str, int]
    model_type: str
    built_in: Model | None

    def uneven(self, ranks: int) -> dict[str, int]:
        """The sizes that ``ranks`` shards do not share equally."""
        return {name: size for name, size in self.sizes.items() if size % ranks}


def local_model(path: str) -> LocalModel | None:
    """None where ``path`` is not a local directory with a configuration in Hugging Face's form."""
    try:
        file = pathlib.Path(path).expanduser() / "config.json"
        if not file.is_file() or file.stat().st_size > _LARGEST:
            return None
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # pathlib raises the last for the home of an unknown user.
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    model_type = str(config.get("model_type", ""))
    built_in = _BUILT_IN.get(model_type)
    if built_in == "qwen3" and inner.get("tie_word_embeddings"):
        built_in = "qwen3-tied"
    return LocalModel(sizes=_sizes(inner), model_type=model_type, built_in=built_in)


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    sizes = {name: size for name in _SIZES if (size := _size(config, name))}
    heads = _size(config, "num_attention_heads")
    head_dim = _size(config, "head_dim") or (_size(config, "hidden_size") // heads if heads else 0)
    for name in _HEADS:
        if count := _size(config, name) * head_dim:
            sizes[f"{name} * head_dim"] = count
    return sizes


def _size(config: Mapping[str, Any], name: str) -> int:
    """A positive number, or 0 for anything else."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
