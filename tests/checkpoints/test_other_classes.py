"""``verify`` calls sound what classes of images, sound and detection write, and finds the damage that looks like it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp_doctor.checkpoints import verification

State = dict[str, Any]
_SIZE = 64


def find(directory: pathlib.Path, tensors: State, config: State) -> tuple[str, set[str]]:
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    found = verification.verify(directory)
    return found.answer, {finding.trouble for finding in found.findings}


def make(*names: str, shape: tuple[int, ...] = (_SIZE, _SIZE)) -> State:
    return {name: torch.randn(shape) for name in names}


@pytest.mark.parametrize(
    ("stack", "answer"), [("model.vision_model.encoder.layers", "sound"), ("model.text_model.layers", "damaged")]
)
def test_biases_of_an_encoder_are_not_those_of_the_text_model(tmp_path: pathlib.Path, stack: str, answer: str) -> None:
    weights = make(*(f"model.text_model.layers.{n}.self_attn.q_proj.weight" for n in range(2)))
    weights |= make(*(f"model.vision_model.encoder.layers.{n}.self_attn.q_proj.weight" for n in range(2)))
    weights |= make(*(f"{stack}.{n}.self_attn.q_proj.bias" for n in range(2)), shape=(_SIZE,))
    config = {"model_type": "idefics2", "text_config": {"model_type": "mistral", "num_hidden_layers": 2}}
    assert find(tmp_path, weights, config) == (answer, {"other_model"} if answer == "damaged" else set())


def test_an_encoder_without_its_text_model_is_sound(tmp_path: pathlib.Path) -> None:
    weights = make(*(f"vision_model.encoder.layers.{n}.self_attn.qkv.weight" for n in range(2)))
    assert find(tmp_path, weights, {"model_type": "blip-2", "text_config": {"model_type": "opt"}}) == ("sound", set())


@pytest.mark.parametrize(("zero", "answer", "trouble"), [(2, "sound", "zero_last"), (1, "damaged", "zero_matrix")])
def test_only_the_last_matrix_of_a_head_may_begin_as_zeros(
    tmp_path: pathlib.Path, zero: int, answer: str, trouble: str
) -> None:
    weights = make(*(f"bbox_embed.{head}.layers.{n}.weight" for head in range(2) for n in range(3)))
    for head in range(2):
        weights[f"bbox_embed.{head}.layers.{zero}.weight"].zero_()
    assert find(tmp_path, weights, {"model_type": "d_fine"}) == (answer, {trouble})


@pytest.mark.parametrize(("bias", "answer"), [(_SIZE, "sound"), (8, "damaged")])
def test_a_norm_in_a_list_with_convolutions_is_not_a_flat_one(tmp_path: pathlib.Path, bias: int, answer: str) -> None:
    weights = make("stages.0.downsample_layers.0.weight", shape=(_SIZE, 3, 4, 4)) | {
        "stages.0.downsample_layers.0.bias": torch.randn(_SIZE),
        "stages.1.downsample_layers.0.weight": torch.ones(_SIZE),
        "stages.1.downsample_layers.0.bias": torch.randn(bias),
    }
    assert find(tmp_path, weights, {"model_type": "dinov3_convnext"}) == (answer, {"flat"} if bias == 8 else set())


@pytest.mark.parametrize(("name", "answer"), [("input_max", "sound"), ("scale", "damaged")])
def test_a_bound_of_values_may_be_infinite(tmp_path: pathlib.Path, name: str, answer: str) -> None:
    weights = make("layers.0.q_proj.weight") | {f"layers.0.q_proj.{name}": torch.tensor(float("inf"))}
    assert find(tmp_path, weights, {}) == (answer, {"infinite"} if answer == "sound" else {"nonfinite"})


@pytest.mark.parametrize(("lost", "answer"), [("crossattention", "sound"), ("attention", "damaged")])
def test_one_of_two_layers_may_have_no_cross_attention(tmp_path: pathlib.Path, lost: str, answer: str) -> None:
    parts = ("attention.attention.query", "crossattention.attention.query", "output.dense")
    weights = make(*(f"qformer.encoder.layer.{n}.{part}.weight" for n in range(2) for part in parts))
    del weights[f"qformer.encoder.layer.1.{lost}.attention.query.weight"]
    trouble = "unusual" if answer == "sound" else "missing_tensor"
    assert find(tmp_path, weights, {"model_type": "blip-2"}) == (answer, {trouble})


def test_three_matrices_of_one_layer_are_not_each_others_siblings(tmp_path: pathlib.Path) -> None:
    shapes = {"w1": (112, _SIZE), "w2": (_SIZE, 112), "w3": (112, _SIZE)}
    weights = {f"layers.0.feed_forward.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    weights |= make("layers.0.attention.wq.weight", "layers.1.attention.wq.weight")
    assert find(tmp_path, weights, {"model_type": "mistral_large4"}) == ("sound", set())


@pytest.mark.parametrize(("rows", "answer"), [(319, "sound"), (318, "damaged")])
def test_the_start_token_of_imagegpt_has_no_row_in_the_head(tmp_path: pathlib.Path, rows: int, answer: str) -> None:
    weights = make("lm_head.weight", shape=(rows, _SIZE)) | make("transformer.wte.weight", shape=(320, _SIZE))
    assert find(tmp_path, weights, {"model_type": "imagegpt", "vocab_size": 320, "n_embd": _SIZE})[0] == answer


@pytest.mark.parametrize(("more", "answer"), [({}, "sound"), ({"vocab_size": 320}, "damaged")])
def test_an_encoder_may_ignore_the_groups_of_config_json(tmp_path: pathlib.Path, more: State, answer: str) -> None:
    weights = make(*(f"layers.{n}.self_attn.{kind}_proj.weight" for n in range(2) for kind in "qkvo"))
    config = {"model_type": "audio", "hidden_size": _SIZE, "num_attention_heads": 4, "num_key_value_heads": 2, **more}
    assert find(tmp_path, weights, config) == (answer, {"unusual"} if answer == "sound" else {"shape"})
