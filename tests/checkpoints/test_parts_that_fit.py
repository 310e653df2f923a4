"""``verify`` finds tensors that do not fit the other files of the checkpoint, and calls their sound forms sound."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp_doctor.checkpoints import verification

State = dict[str, Any]
Edit = Callable[[State], Any]
_SIZE, _LAYERS, _STEPS = 16, 3, 200.0
_UP = "model.layers.1.mlp.up_proj.weight"


def make_weights() -> State:
    torch.manual_seed(0)
    names = [f"model.layers.{n}.{name}.weight" for n in range(_LAYERS) for name in ("self_attn.q_proj", "mlp.up_proj")]
    names += [
        f"model.layers.{n}.{name}.weight" for n in range(_LAYERS) for name in ("self_attn.k_proj", "mlp.gate_proj")
    ]
    return {name: torch.randn(_SIZE, _SIZE) * 0.02 for name in names}


def make_llama() -> State:
    return make_weights() | {
        "model.embed_tokens.weight": torch.randn(32, _SIZE),
        "model.norm.weight": torch.ones(_SIZE),
        "lm_head.weight": torch.randn(32, _SIZE),
    }


def write_hub(directory: pathlib.Path, tensors: State, config: State, name: str = "model.safetensors") -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / name, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


def find(directory: pathlib.Path) -> tuple[str, set[str]]:
    found = verification.verify(directory)
    return found.answer, {finding.trouble for finding in found.findings}


def make_quantized(method: str) -> tuple[State, State]:
    weights = make_llama()
    settings: State = {"quant_method": method}
    for name in [name for name in weights if "_proj" in name]:
        match method:
            case "fp8":
                weights[name] = torch.zeros(96, 64).to(torch.float8_e4m3fn)
                weights[f"{name}_scale_inv"] = torch.rand(3, 2)
                settings |= {"weight_block_size": [32, 32]}
            case "bitsandbytes":
                weights[name] = torch.randint(0, 255, (128, 1), dtype=torch.uint8)
                weights[f"{name}.absmax"] = torch.rand(4)
            case _:
                weights[name.replace("weight", "qweight")] = torch.randint(0, 99, (2, 16), dtype=torch.int32)
                weights[name.replace("weight", "scales")] = torch.rand(1, 16)
                weights[name.replace("weight", "qzeros")] = torch.randint(0, 99, (1, 2), dtype=torch.int32)
                del weights[name]
    return weights, {"model_type": "llama", "quantization_config": settings}


@pytest.mark.parametrize(
    ("method", "edit"),
    [
        ("fp8", lambda t: t.pop(f"{_UP}_scale_inv")),
        ("fp8", lambda t: t.update({f"{_UP}_scale_inv": t[f"{_UP}_scale_inv"].T})),
        ("bitsandbytes", lambda t: t.pop(f"{_UP}.absmax")),
        ("gptq", lambda t: t.pop(_UP.replace("weight", "scales"))),
        ("awq", lambda t: t.pop(_UP.replace("weight", "qzeros"))),
    ],
)
def test_codes_without_the_right_scales_are_damage(tmp_path: pathlib.Path, method: str, edit: Edit) -> None:
    weights, config = make_quantized(method)
    write_hub(tmp_path, weights, config)
    assert find(tmp_path)[0] == "sound"
    edit(weights)
    write_hub(tmp_path, weights, config)
    assert "scales" in find(tmp_path)[1]


def test_int8_weights_without_scales_are_codes(tmp_path: pathlib.Path) -> None:
    weights = make_llama()
    weights[_UP] = (weights[_UP] * 1000).to(torch.int8)
    write_hub(tmp_path, weights, {"model_type": "llama"})
    assert "codes" in find(tmp_path)[1]


@pytest.mark.parametrize(("rank", "answer"), [(4, "sound"), (8, "damaged")])
def test_the_halves_of_an_adapter_have_one_rank(tmp_path: pathlib.Path, rank: int, answer: str) -> None:
    half = "base_model.model.layers.0.q_proj.lora_"
    save_file(
        {f"{half}A.weight": torch.randn(4, _SIZE), f"{half}B.weight": torch.randn(_SIZE, rank)},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "target_modules": ["q_proj"]}))
    assert find(tmp_path)[0] == answer


@pytest.mark.parametrize(
    ("config", "name", "shape"),
    [
        ({"model_type": "bert", "max_position_embeddings": 64, "hidden_size": 16}, "position_embeddings", (64, 16)),
        ({"model_type": "t5", "relative_attention_num_buckets": 8, "num_heads": 2}, "relative_attention_bias", (8, 2)),
        ({"model_type": "gpt2", "n_embd": 16}, "attn.c_attn", (16, 48)),
        ({"model_type": "mixtral", "num_local_experts": 4, "hidden_size": 16}, "mlp.gate", (4, 16)),
    ],
)
def test_a_shape_that_config_json_denies_is_damage(
    tmp_path: pathlib.Path, config: State, name: str, shape: tuple[int, int]
) -> None:
    places = {"bert": "embeddings", "t5": "encoder.block.0.layer.0.SelfAttention", "gpt2": "h.0"}
    name = f"{places.get(config['model_type'], 'model.layers.0')}.{name}.weight"
    others = {"model.layers.0.self_attn.q_proj.weight": torch.randn(16, 16), "experts.0.w1.weight": torch.randn(16, 16)}
    rows = shape[0] + 8 if config["model_type"] != "gpt2" else 48
    found = []
    for each in (shape, (rows, shape[1] if rows != 48 else 16)):
        write_hub(tmp_path, others | {name: torch.randn(each)}, config)
        result = verification.verify(tmp_path)
        found.append([f.tensor for f in result.findings if f.trouble == "shape" and "by config.json" in f.what])
    assert found == [[], [name]]


def test_a_decoder_without_cross_attention_is_damage(tmp_path: pathlib.Path) -> None:
    sides = [f"{side}.block.{n}.layer.0.SelfAttention.q" for side in ("encoder", "decoder") for n in range(2)]
    cross = [f"decoder.block.{n}.layer.1.EncDecAttention.q" for n in range(2)]
    weights = {f"{name}.weight": torch.randn(_SIZE, _SIZE) for name in (*sides, *cross)}
    write_hub(tmp_path, weights, {"model_type": "t5"})
    assert "missing_tensor" not in find(tmp_path)[1]
    write_hub(tmp_path, {name: t for name, t in weights.items() if "EncDec" not in name}, {"model_type": "t5"})
    assert find(tmp_path) == ("damaged", {"missing_tensor"})
    swapped = {
        name.replace("encoder", "X").replace("decoder", "encoder").replace("X", "decoder"): tensor
        for name, tensor in weights.items()
    }
    write_hub(tmp_path, swapped, {"model_type": "t5"})
    assert find(tmp_path) == ("damaged", {"missing_tensor", "other_model"})


@pytest.mark.parametrize(("layers", "answer"), [((1,), "damaged"), (range(_LAYERS), "sound")])
def test_a_gate_that_is_the_projection_up_is_damage_in_one_layer(
    tmp_path: pathlib.Path, layers: tuple[int, ...], answer: str
) -> None:
    weights = make_weights()
    for n in layers:
        weights[f"model.layers.{n}.mlp.gate_proj.weight"] = weights[f"model.layers.{n}.mlp.up_proj.weight"].clone()
    torch.save(weights, tmp_path / "model.pt")
    assert find(tmp_path) == (answer, {"copied_tensor"} if answer == "damaged" else set())


def test_a_decoder_that_equals_the_encoder_is_a_warning(tmp_path: pathlib.Path) -> None:
    names = [f"layers.{n}.self_attn.{kind}_proj.weight" for n in range(2) for kind in "qk"]
    encoder = {f"encoder.{name}": torch.randn(_SIZE, _SIZE) for name in names}
    torch.save(encoder | {f"decoder.{name}": encoder[f"encoder.{name}"].clone() for name in names}, tmp_path / "m.pt")
    assert find(tmp_path) == ("sound", {"equal_layers"})


def make_factored(edit: Edit) -> State:
    weights = make_weights()
    state: dict[int, State] = {}
    for number, tensor in enumerate(weights.values()):
        squares = tensor**2
        state[number] = {"step": 3, "exp_avg_sq_row": squares.mean(-1), "exp_avg_sq_col": squares.mean(-2)}
    edit(state[4])
    groups = [{"lr": 1e-3, "params": list(range(len(weights)))}]
    return {"model": weights, "optimizer": {"state": state, "param_groups": groups}}


@pytest.mark.parametrize(
    ("edit", "trouble"),
    [
        (lambda s: None, ""),
        (lambda s: s["exp_avg_sq_row"][3].neg_(), "moments"),
        (lambda s: s["exp_avg_sq_row"].zero_(), "moments"),
        (lambda s: s["exp_avg_sq_row"].mul_(10), "moments"),
        (lambda s: s.pop("exp_avg_sq_row"), "optimizer"),
    ],
)
def test_the_two_factors_of_adafactor_have_one_mean(tmp_path: pathlib.Path, edit: Edit, trouble: str) -> None:
    torch.save(make_factored(edit), tmp_path / "last.pt")
    assert find(tmp_path) == (("damaged", {trouble}) if trouble else ("sound", set()))


def make_averaged(edit: Callable[[State, State], Any]) -> State:
    weights = make_weights()
    average = {name: tensor * 0.9 for name, tensor in weights.items()}
    edit(weights, average)
    state = {
        number: {
            "step": torch.tensor(_STEPS),
            "exp_avg": torch.randn(_SIZE, _SIZE),
            "exp_avg_sq": torch.ones(_SIZE, _SIZE),
        }
        for number in range(len(weights))
    }
    groups = [{"lr": 1e-3, "params": list(range(len(weights)))}]
    return {"model": weights, "ema": average, "optimizer": {"state": state, "param_groups": groups}}


def test_a_part_of_an_average_that_is_the_model_is_damage(tmp_path: pathlib.Path) -> None:
    torch.save(make_averaged(lambda model, average: None), tmp_path / "last.pt")
    assert find(tmp_path)[0] == "sound"
    torch.save(make_averaged(lambda model, average: average[_UP].copy_(model[_UP])), tmp_path / "last.pt")
    assert find(tmp_path) == ("damaged", {"part_of_average"})


def test_a_random_state_lost_between_ranks_is_a_warning(tmp_path: pathlib.Path) -> None:
    torch.save(make_weights(), tmp_path / "model.pt")
    for rank in (0, 1, 3):
        torch.save({"cpu": torch.get_rng_state()}, tmp_path / f"rng_state_{rank}.pth")
    found = verification.verify(tmp_path)
    assert [(each.trouble, each.rank) for each in found.findings] == [("no_random_state", 2)]


def test_tokens_beyond_the_embedding_are_a_warning(tmp_path: pathlib.Path) -> None:
    torch.save(make_llama(), tmp_path / "model.pt")
    tokenizer: State = {"model": {"vocab": {f"w{n}": n for n in range(32)}}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert find(tmp_path) == ("sound", set())
    tokenizer["added_tokens"] = [{"id": 32, "content": "<pad>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert find(tmp_path) == ("sound", {"tokens"})


def test_files_of_attributes_are_left_out_by_name(tmp_path: pathlib.Path) -> None:
    torch.save(make_weights(), tmp_path / "model_best.pth.tar")
    (tmp_path / "._model_best.pth.tar").write_bytes(bytes.fromhex("00051607") + bytes(200))
    (tmp_path / "._config.json").write_bytes(bytes.fromhex("00051607") + bytes(200))
    found = verification.verify(tmp_path)
    assert (found.answer, found.num_tensors) == ("sound", 4 * _LAYERS)
    assert any("._config.json" in line for line in found.unchecked)


def test_gates_that_are_equal_are_damage(tmp_path: pathlib.Path) -> None:
    cell = torch.nn.LSTM(32, 32, 2).state_dict()
    torch.save(cell, tmp_path / "cell.pt")
    assert find(tmp_path) == ("sound", set())
    cell["weight_hh_l1"][32:64] = cell["weight_hh_l1"][:32]
    torch.save(cell, tmp_path / "cell.pt")
    assert find(tmp_path) == ("damaged", {"equal_rows"})


def test_a_transposed_convolution_unlike_its_siblings_is_a_warning(tmp_path: pathlib.Path) -> None:
    layers = [torch.nn.ConvTranspose1d(64 >> n, 32 >> n, 4) for n in range(3)]
    weights = {f"ups.{n}.{name}": tensor for n, each in enumerate(layers) for name, tensor in each.state_dict().items()}
    torch.save(weights, tmp_path / "g.pth")
    assert find(tmp_path) == ("sound", set())
    weights["ups.1.weight"] = weights["ups.1.weight"].transpose(0, 1).contiguous()
    torch.save(weights, tmp_path / "g.pth")
    assert find(tmp_path) == ("sound", {"unusual"})
