"""Models of every class of transformers that writes text, fresh and trained: none is called damaged."""

from __future__ import annotations

import pathlib
import shutil
import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

from fsdp_doctor.checkpoints.checks.evidence import LAYER
from fsdp_doctor.checkpoints.model_types import LAYER_MARKS, find_marks
from fsdp_doctor.checkpoints.verification import verify

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
_MASKED = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
_CLASSES = {
    **_MASKED,
    **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}
# Values of what configurations call a size, for a model of at most some million parameters.
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 112),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "kv_lora_rank", "rotary_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "state_size", "attention_window", "mamba_n_heads"), 8),
    "vocab_size": 320,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "decoder_start_token_id": 2,
}
# They ask for a compiler when they are made.
_COMPILED = {"mra", "rwkv", "yoso"}
_MOST_PARAMETERS = 8_000_000
# Of more than 200 types; the others cannot be made this small, or need a package.
_FEWEST_TYPES = 130


def make_small_model(model_type: str) -> Any:
    """Makes a small model of a type; None where its class cannot be made so."""
    try:
        sizes = dict(_SIZES)
        base = transformers.AutoConfig.for_model(model_type)
        if hasattr(base, "qk_rope_head_dim"):
            del sizes["head_dim"]
        config = transformers.AutoConfig.for_model(model_type, **{k: v for k, v in sizes.items() if hasattr(base, k)})
        config.decoder_start_token_id = 2
        name = _CLASSES[model_type]
        kind = getattr(transformers, name if isinstance(name, str) else name[0])
        with torch.device("meta"):
            if sum(parameter.numel() for parameter in kind(config).parameters()) > _MOST_PARAMETERS:
                return None
        return kind(config)
    except Exception:  # of any class's own checks
        return None


def train(model: Any, model_type: str) -> dict[str, Any] | None:
    """Trains for three steps; returns the optimizer's state, None where the class needs other inputs."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    try:
        for _ in range(3):
            tokens = torch.randint(3, 320, (2, 16))
            more = {} if model_type in _MASKED else {"use_cache": False}
            model(input_ids=tokens, labels=tokens, **more).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception:  # of any class's own
        return None
    return optimizer.state_dict()


def test_no_sound_model_of_any_class_is_called_damaged(tmp_path: pathlib.Path) -> None:
    damaged, checked = [], set()
    for model_type in sorted(_CLASSES.keys() - _COMPILED):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            if (model := make_small_model(model_type)) is None:
                continue
            model.save_pretrained(tmp_path / "fresh")
            if (optimizer := train(model, model_type)) is not None:
                model.save_pretrained(tmp_path / "trained")
                torch.save(optimizer, tmp_path / "trained" / "optimizer.pt")
                average = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                state = {"model": model.state_dict(), "optimizer": optimizer, "step": 3, "ema": average}
                torch.save(state, tmp_path / "all.pt")
        for path in list(tmp_path.iterdir()):
            found = verify(path)
            checked.add(model_type)
            if found.answer != "sound":
                damaged.append(f"{model_type}: {found.to_text()}")
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not damaged, "\n".join(damaged)
    assert len(checked) >= _FEWEST_TYPES


@pytest.mark.parametrize("model_type", LAYER_MARKS)
def test_the_marks_of_a_model_type_are_those_of_its_class(model_type: str) -> None:
    marks = find_marks({"model_type": model_type})
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(model_type))
    names = {found["rest"] for name in model.state_dict() if (found := LAYER.match(name))}
    assert marks is not None
    assert all(any(mark.search(name) for name in names) for mark in marks.needed)
    assert not [name for name in names if any(mark.search(name) for mark in marks.foreign)]
