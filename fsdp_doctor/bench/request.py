"""What a benchmark measures. Read without torch."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

from fsdp_doctor.matrix.contracts import Direction

# The shapes of models that are trained, from their configurations on the Hugging Face hub.
SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3-4b": (
        "Qwen3Config",
        {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-0.6b": (
        "Qwen3Config",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
    ),
    "small": (
        "Qwen3Config",
        {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "vocab_size": 4096,
            "tie_word_embeddings": True,
        },
    ),
}

# As the probe's axes have them: no offload, verl's manual one, CPUOffloadPolicy pinned or not.
OFFLOADS: dict[str, str] = {
    "none": "the shards are on the device",
    "param": 'model.to("cpu"): the shards are in pageable host memory',
    "policy": "CPUOffloadPolicy: the shards are in pinned host memory",
    "policy-unpinned": "CPUOffloadPolicy(pin_memory=False): pageable",
}
STRATEGIES = ("fsdp2", "fsdp1", "fsdp1-orig")
_FSDP1_PATHS = (
    "full_tensors",
    "full_state_dict",
    "sharded_state_dict.full_tensor",
    "summon_full_params",
    "get_model_state_dict.full",
    "get_model_state_dict.full+cpu",
)
PATHS: dict[str, tuple[str, ...]] = {
    "fsdp2": (
        "full_tensors",
        "full_state_dict",
        "state_dict.to.full_tensor",
        "stage-whole-model",
        "unshard",
        "get_model_state_dict.full",
        "get_model_state_dict.full+cpu",
    ),
    "fsdp1": _FSDP1_PATHS,
    "fsdp1-orig": _FSDP1_PATHS,
}
# The way in: where the full tensors are, and by what they are loaded.
SOURCES: dict[str, str] = {
    "rank0": "in pinned memory of rank 0 alone",
    "ranks": "in pinned memory of each rank",
    "files": "in safetensors files that are in the page cache",
}
LOAD_PATHS = ("load_full_tensors", "set_model_state_dict.broadcast", "set_model_state_dict.full")
DTYPES = ("bf16", "fp32", "fp32:bf16")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """model: a name of SHAPES, or a directory with a config.json. layers: instead of the model's own number.

    dtypes: of DTYPES; ``fp32:bf16`` is fp32 shards yielded as bf16. bucket_bytes: each is measured, on the way in the
    first; None for the default.
    paths: names of PATHS, or module:function of the user; on the way in, of LOAD_PATHS; empty for all.
    sources: of SOURCES, for the way in.
    """

    direction: Direction
    sources: tuple[str, ...]
    model: str
    directory: pathlib.Path | None
    layers: int | None
    strategies: tuple[str, ...]
    offloads: tuple[str, ...]
    dtypes: tuple[str, ...]
    bucket_bytes: tuple[int | None, ...]
    paths: tuple[str, ...]
    repeat: int
    device: str
    json_file: pathlib.Path | None
