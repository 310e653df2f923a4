"""``fsdp-doctor checkpoint verify`` of ranks' plain tensors: no file says which part of the model each rank has."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp_doctor.checkpoints import conversion, verification
from fsdp_doctor.checkpoints.targets import ConversionTarget
from fsdp_doctor.weights.fingerprints.checkpoint_files import fingerprint_checkpoint
from fsdp_doctor.weights.fingerprints.fingerprint_set import FingerprintError

Tensors = dict[str, torch.Tensor]
Cut = Callable[[str, torch.Tensor, int], torch.Tensor | None]
WIDTH, INNER, VOCABULARY, LAYERS = 32, 64, 101, 4
EMBED = "model.embed_tokens.weight"


def make_model() -> Tensors:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    model = {EMBED: draw(VOCABULARY, WIDTH), "model.norm.weight": torch.ones(WIDTH)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            model[f"{layer}.self_attn.{name}.weight"] = draw(WIDTH, WIDTH)
        model[f"{layer}.mlp.gate_proj.weight"], model[f"{layer}.mlp.up_proj.weight"] = (
            draw(INNER, WIDTH),
            draw(INNER, WIDTH),
        )
        model[f"{layer}.mlp.down_proj.weight"] = draw(WIDTH, INNER)
        model[f"{layer}.input_layernorm.weight"] = torch.ones(WIDTH)
        model[f"{layer}.post_attention_layernorm.weight"] = torch.ones(WIDTH)
    return model | {"lm_head.weight": draw(VOCABULARY, WIDTH)}


def cut_rows(_: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.chunk(2)[rank].clone()


def cut_columns(_: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.chunk(2, 1)[rank].clone() if tensor.dim() == 2 else tensor


def cut_as_tensor_parallel(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    if tensor.dim() == 1:
        return tensor
    return tensor.chunk(2, 1 if "o_proj" in name or "down_proj" in name else 0)[rank].clone()


def cut_stages(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    layer = int(name.split(".")[2]) if ".layers." in name else (0 if "embed" in name else LAYERS - 1)
    return tensor if layer // 2 == rank else None


CUTS: dict[str, Cut] = {
    "rows": cut_rows,
    "columns": cut_columns,
    "tensor parallel": cut_as_tensor_parallel,
    "stages": cut_stages,
}
FILES = (
    "model_rank_{}_of_2.pt",
    "model_rank{}.pt",
    "rank{}.pt",
    "rank_{}/model.safetensors",
    "shard-{}.bin",
    "model_{}.pt",
)


def write_settings(directory: pathlib.Path) -> None:
    settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH}
    settings |= {"intermediate_size": INNER, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(settings))


def write_parts(directory: pathlib.Path, cut: Cut, file: str = FILES[0]) -> list[Tensors]:
    write_settings(directory)
    parts = []
    for rank in range(2):
        cuts = {name: cut(name, tensor, rank) for name, tensor in make_model().items()}
        part = {name: tensor for name, tensor in cuts.items() if tensor is not None}
        path = directory / file.format(rank)
        path.parent.mkdir(exist_ok=True)
        save_file(part, path) if path.suffix == ".safetensors" else torch.save(part, path)
        parts.append(part)
    return parts


def list_damages(found: verification.Verification) -> list[str]:
    return [finding.trouble for finding in found.findings if finding.severity == "damage"]


@pytest.mark.parametrize("cut", CUTS)
def test_parts_of_ranks_are_not_damaged(tmp_path: pathlib.Path, cut: str) -> None:
    write_parts(tmp_path, CUTS[cut])
    found = verification.verify(tmp_path)
    assert found.answer == "sound", found.to_text()


@pytest.mark.parametrize("file", FILES)
def test_parts_in_files_of_other_names_are_not_damaged(tmp_path: pathlib.Path, file: str) -> None:
    write_parts(tmp_path, cut_as_tensor_parallel, file)
    found = verification.verify(tmp_path)
    assert found.answer == "sound", found.to_text()
    assert any("no file says how they were divided" in each for each in found.unchecked)


def test_one_rank_s_file_alone_is_not_damaged(tmp_path: pathlib.Path) -> None:
    write_parts(tmp_path, cut_rows)
    found = verification.verify(tmp_path / FILES[0].format(1))
    assert found.answer == "sound", found.to_text()
    assert any("no file says how they were divided" in each for each in found.unchecked)


def test_layers_numbered_by_each_rank_are_not_missing(tmp_path: pathlib.Path) -> None:
    for rank, part in enumerate(write_parts(tmp_path, cut_stages)):
        local = {
            name.replace("layers.2", "layers.0").replace("layers.3", "layers.1"): each for name, each in part.items()
        }
        torch.save(local, tmp_path / FILES[0].format(rank))
    found = verification.verify(tmp_path)
    assert found.answer == "sound", found.to_text()


def test_experts_numbered_by_each_rank_are_not_missing(tmp_path: pathlib.Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for rank, part in enumerate(write_parts(tmp_path, cut_rows)):
        names = [f"model.layers.{n}.mlp.experts.{e}.down_proj.weight" for n in range(LAYERS) for e in range(2)]
        experts = {name: torch.randn(8, 8, generator=generator) for name in names}
        torch.save(part | experts, tmp_path / FILES[0].format(rank))
    settings = json.loads((tmp_path / "config.json").read_text()) | {"num_experts": 4, "model_type": "of_experts"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    found = verification.verify(tmp_path)
    assert found.answer == "sound", found.to_text()


def test_moments_of_parts_are_compared_within_a_rank(tmp_path: pathlib.Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for rank, size in enumerate((1e-3, 1e-9)):
        grad = torch.randn(16, 32, generator=generator) * size
        slots = {"exp_avg": grad * 0.1, "exp_avg_sq": grad.square() * 0.001, "step": torch.tensor(1.0)}
        groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}]
        state = {"model": {"q_proj.weight": grad}, "optimizer": {"state": {0: slots}, "param_groups": groups}}
        torch.save(state, tmp_path / f"model_optim_rank_{rank}_of_2.pt")
    found = verification.verify(tmp_path)
    assert found.answer == "sound", found.to_text()


def _put_nan(parts: list[Tensors]) -> None:
    parts[1]["lm_head.weight"][3, 4] = torch.nan


def _lose_name(parts: list[Tensors]) -> None:
    del parts[1]["model.layers.1.mlp.up_proj.weight"]


def _change_dtype(parts: list[Tensors]) -> None:
    parts[1][EMBED] = parts[1][EMBED].half()


DAMAGES: dict[str, tuple[Callable[[list[Tensors]], None], str]] = {
    "NaN": (_put_nan, "nonfinite"),
    "a lost name": (_lose_name, "ranks_disagree"),
    "another dtype": (_change_dtype, "ranks_disagree"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_within_parts_is_found(tmp_path: pathlib.Path, damage: str) -> None:
    parts = write_parts(tmp_path, cut_rows)
    change, trouble = DAMAGES[damage]
    change(parts)
    for rank, part in enumerate(parts):
        torch.save(part, tmp_path / FILES[0].format(rank))
    found = verification.verify(tmp_path)
    assert {*list_damages(found)} == {trouble}, found.to_text()


def test_equal_files_of_ranks_are_whole_and_judged_by_shape(tmp_path: pathlib.Path) -> None:
    write_parts(tmp_path, lambda _name, tensor, _rank: tensor.chunk(2)[0].clone())
    assert "shape" in list_damages(verification.verify(tmp_path))


def test_parts_without_a_layout_are_neither_converted_nor_fingerprinted(tmp_path: pathlib.Path) -> None:
    (tmp_path / "parts").mkdir()
    write_parts(tmp_path / "parts", cut_rows)
    with pytest.raises(conversion.ConversionError, match="does not say how the whole tensors were divided"):
        conversion.convert(tmp_path / "parts", tmp_path / "new", ConversionTarget.HF)
    with pytest.raises(FingerprintError, match="does not say how the whole tensors were divided"):
        fingerprint_checkpoint(tmp_path / "parts")


def test_a_stage_s_lost_tensor_is_damage(tmp_path: pathlib.Path) -> None:
    def cut(name: str, tensor: torch.Tensor, rank: int) -> Any:
        return None if "layers.1.mlp.up" in name else cut_stages(name, tensor, rank)

    write_parts(tmp_path, cut)
    assert list_damages(verification.verify(tmp_path)) == ["missing_tensor"]
