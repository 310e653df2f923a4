"""Tiny models of the families in transformers whose tensors have different names on the Hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

# transformers before 5.0.0 does not define the names on the Hub.
pytest.importorskip("transformers.core_model_loading")

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {**_TEXT, "head_dim": 8}
_TOP_2 = {"num_experts_per_tok": 2}
_LOCAL_EXPERTS = {**_TOP_2, "num_local_experts": 4}
_EXPERTS = {**_TOP_2, "num_experts": 4}
_ROUTED = {**_TOP_2, "n_routed_experts": 4, "topk_group": 1, "first_k_dense_replace": 1}
_NARROW = {"moe_intermediate_size": 16}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_PATCHES = {**_VISION, "image_size": 16, "patch_size": 4}
_DEEP_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
_MERGED_VISION = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
_SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}

# Maps a family to the stem of its class names, the suffix of the model's class, and the configuration.
_TABLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", _TEXT),
    "llama-tied": ("Llama", "ForCausalLM", {**_TEXT, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "ForCausalLM", _HEADS),
    "gpt2": ("GPT2", "LMHeadModel", _SMALL),
    "phi3": ("Phi3", "ForCausalLM", _TEXT),
    "gemma3-text": ("Gemma3", "ForCausalLM", _HEADS),
    "mamba": (
        "Mamba",
        "ForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 4},
    ),
    "qwen3-moe": ("Qwen3Moe", "ForCausalLM", {**_HEADS, **_EXPERTS, **_NARROW}),
    "mixtral": ("Mixtral", "ForCausalLM", {**_TEXT, **_LOCAL_EXPERTS}),
    "gpt-oss": ("GptOss", "ForCausalLM", {**_HEADS, **_LOCAL_EXPERTS}),
    "deepseek-v3": (
        "DeepseekV3",
        "ForCausalLM",
        {**_TEXT, **_ROUTED, **_NARROW, **_LATENT, "num_key_value_heads": 4, "n_group": 2},
    ),
    "olmoe": ("Olmoe", "ForCausalLM", {**_TEXT, **_EXPERTS}),
    "glm4-moe": ("Glm4Moe", "ForCausalLM", {**_HEADS, **_ROUTED, **_NARROW, "n_group": 1}),
    "llama4-text": (
        "Llama4",
        "ForCausalLM",
        {**_HEADS, **_LOCAL_EXPERTS, "intermediate_size_mlp": 48, "num_experts_per_tok": 1},
    ),
    "qwen2-vl": (
        "Qwen2VL",
        "ForConditionalGeneration",
        {"text_config": {**_TEXT, **_MROPE}, "vision_config": _MERGED_VISION},
    ),
    "qwen3-vl": (
        "Qwen3VL",
        "ForConditionalGeneration",
        {"text_config": {**_HEADS, **_MROPE}, "vision_config": _DEEP_VISION},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        "ForConditionalGeneration",
        {"text_config": {**_HEADS, **_MROPE, **_EXPERTS, **_NARROW}, "vision_config": _DEEP_VISION},
    ),
    "gemma3-vision": (
        "Gemma3",
        "ForConditionalGeneration",
        {"text_config": _HEADS, "vision_config": _PATCHES, "mm_tokens_per_image": 4},
    ),
    "llava": (
        "Llava",
        "ForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_PATCHES, "model_type": "clip_vision_model"},
        },
    ),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96},
    ),
}
FAMILIES = tuple(_TABLE)
TEXT_CONFIGS = {"gemma3-text": "Gemma3TextConfig", "llama4-text": "Llama4TextConfig"}


@torch.no_grad()
def new_family(family: str, seed: int = 0) -> Any:
    """Makes a model with random weights, including biases and norms."""
    name, head, settings = _TABLE[family]
    config = getattr(transformers, TEXT_CONFIGS.get(family, f"{name}Config"))(**settings)
    kind: Callable[[Any], Any] = getattr(transformers, name + head)
    torch.manual_seed(seed)
    model = kind(config)
    for parameter in model.parameters():
        parameter.normal_()
    model.tie_weights()
    return model
