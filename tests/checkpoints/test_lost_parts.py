"""``verify`` finds parts of a model that were lost, or gathered twice, and calls their sound forms sound."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp_doctor.checkpoints import verification

State = dict[str, Any]
_SIZE, _LAYERS = 64, 3
_ADAPTERS = [f"base_model.model.layers.{n}.q_proj" for n in range(_LAYERS)]
_DORA: State = {"r": 4, "target_modules": ["q_proj"], "use_dora": True}


def find(directory: pathlib.Path) -> tuple[str, set[str]]:
    found = verification.verify(directory)
    return found.answer, {finding.trouble for finding in found.findings}


def write_hub(directory: pathlib.Path, tensors: State, config: State) -> None:
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


def make_layers() -> State:
    torch.manual_seed(0)
    kinds = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    return {f"model.layers.{n}.{kind}.weight": torch.randn(_SIZE, _SIZE) for n in range(_LAYERS) for kind in kinds}


@pytest.mark.parametrize(
    ("config", "answer", "troubles"),
    [
        ({"num_experts": 4}, "sound", set()),
        ({"num_experts": 8}, "damaged", {"experts"}),
        ({"n_routed_experts": 3, "zero_expert_num": 1}, "sound", set()),
    ],
)
def test_experts_in_one_tensor_are_as_many_as_config_json_says(
    tmp_path: pathlib.Path, config: State, answer: str, troubles: set[str]
) -> None:
    experts = {f"model.layers.{n}.mlp.experts.down_proj": torch.randn(4, _SIZE, 8) for n in range(_LAYERS)}
    write_hub(tmp_path, make_layers() | experts, config)
    assert find(tmp_path) == (answer, troubles)


@pytest.mark.parametrize(
    ("config", "with_magnitude", "answer"),
    [
        (_DORA, _ADAPTERS, "sound"),
        (_DORA, _ADAPTERS[:1], "damaged"),
        ({**_DORA, "use_dora": False}, [], "sound"),
        ({"r": 4, "target_modules": ["q_proj"]}, _ADAPTERS[:2], "damaged"),
    ],
)
def test_an_adapter_of_dora_without_its_magnitudes_is_damage(
    tmp_path: pathlib.Path, config: State, with_magnitude: list[str], answer: str
) -> None:
    halves = {f"{name}.lora_A.weight": torch.randn(4, _SIZE) for name in _ADAPTERS}
    halves |= {f"{name}.lora_B.weight": torch.randn(_SIZE, 4) for name in _ADAPTERS}
    magnitudes = {f"{name}.lora_magnitude_vector": torch.rand(_SIZE) for name in with_magnitude}
    save_file(halves | magnitudes, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert find(tmp_path) == (answer, {"lora_pair"} if answer == "damaged" else set())


@pytest.mark.parametrize(("is_trained", "answer"), [(True, "damaged"), (False, "sound")])
def test_an_average_without_a_trained_layer_is_damage(tmp_path: pathlib.Path, is_trained: bool, answer: str) -> None:
    model = make_layers()
    average = {name: tensor * 0.9 for name, tensor in model.items() if ".layers.2." not in name}
    moments = {
        name: {"step": torch.tensor(4.0), "exp_avg": torch.randn(_SIZE, _SIZE), "exp_avg_sq": torch.ones(_SIZE, _SIZE)}
        for name in model
        if is_trained or name in average
    }
    optimizer = {"state": moments, "param_groups": [{"lr": 1e-3, "params": list(moments)}]}
    torch.save({"model": model, "ema": average, "optimizer": optimizer}, tmp_path / "last.pt")
    assert find(tmp_path) == (answer, {"average"} if is_trained else set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("layers", "answer"), [((), "sound"), ((1,), "damaged"), (range(_LAYERS), "sound")])
@pytest.mark.parametrize("parts", [2, 4])
def test_columns_gathered_twice_are_damage_in_one_layer(
    tmp_path: pathlib.Path, dtype: torch.dtype, layers: tuple[int, ...], answer: str, parts: int
) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in make_layers().items()}
    for n in layers:
        divided = weights[f"model.layers.{n}.mlp.down_proj.weight"].view(_SIZE, parts, -1)
        divided[:, -1] = divided[:, 0]
    torch.save(weights, tmp_path / "model.pt")
    assert find(tmp_path) == (answer, {"equal_rows"} if answer == "damaged" else set())


@pytest.mark.parametrize(
    ("model_type", "of_layers", "answer", "troubles"),
    [
        ("llama", 1.0, "damaged", {"zero_matrix"}),
        ("gemma", 0.1, "sound", {"unusual"}),
        ("gemma", 0.0, "sound", set()),
    ],
)
def test_a_last_norm_that_alone_is_zero_is_damage(
    tmp_path: pathlib.Path, model_type: str, of_layers: float, answer: str, troubles: set[str]
) -> None:
    norms = {f"model.layers.{n}.input_layernorm.weight": torch.full((_SIZE,), of_layers) for n in range(_LAYERS)}
    write_hub(tmp_path, make_layers() | norms | {"model.norm.weight": torch.zeros(_SIZE)}, {"model_type": model_type})
    assert find(tmp_path) == (answer, troubles)


@pytest.mark.parametrize("lost", ["", "cls_token", "position_embeddings"])
def test_a_model_of_images_without_its_token_is_damage(tmp_path: pathlib.Path, lost: str) -> None:
    weights = {f"vit.layers.{n}.attention.q_proj.weight": torch.randn(_SIZE, _SIZE) for n in range(_LAYERS)} | {
        "vit.embeddings.cls_token": torch.randn(1, 1, _SIZE),
        "vit.embeddings.position_embeddings": torch.randn(1, 5, _SIZE),
        "vit.embeddings.patch_embeddings.projection.weight": torch.randn(_SIZE, 3, 8, 8),
    }
    kept = {name: tensor for name, tensor in weights.items() if not lost or not name.endswith(lost)}
    write_hub(tmp_path, kept, {"model_type": "vit"})
    assert find(tmp_path) == (("damaged", {"missing_tensor"}) if lost else ("sound", set()))


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_a_rank_with_other_settings_of_the_optimizer_is_damage(
    originals: pathlib.Path, tmp_path: pathlib.Path, key: str
) -> None:
    directory = tmp_path / "verl"
    shutil.copytree(originals / "verl", directory)
    assert find(directory)[0] == "sound"
    file = directory / "optim_world_size_2_rank_1.pt"
    optimizer = torch.load(file, weights_only=False)
    optimizer["param_groups"][0][key] = 0.5
    torch.save(optimizer, file)
    found = verification.verify(directory)
    assert found.answer == "damaged"
    assert [(each.trouble, each.file, each.rank) for each in found.findings] == [("ranks_disagree", file.name, 1)]


def test_a_lost_last_shard_is_a_missing_file_by_config_json(tmp_path: pathlib.Path) -> None:
    """Only config.json tells how many rows there were: the remedy is to restore the file, not to change config.json."""
    weights = {name: tensor.clone() for name, tensor in make_layers().items()} | {
        "model.embed_tokens.weight": torch.randn(320, _SIZE)
    }
    halves = {name: tensor[: len(tensor) // 2].contiguous() for name, tensor in weights.items()}
    places = {name: {"saved_offsets": [0, 0]} for name in halves}
    file = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file(halves, file, {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0"})
    config = {"model_type": "llama", "hidden_size": _SIZE, "num_attention_heads": 4, "intermediate_size": _SIZE}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 320}))
    assert find(tmp_path) == ("damaged", {"missing_rank"})
