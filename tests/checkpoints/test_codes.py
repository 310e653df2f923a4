"""``fsdp-doctor checkpoint verify`` of quantized weights whose codes were saved as if they were the weights."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp_doctor.checkpoints import verification

NAME = "model.layers.{}.mlp.down_proj.weight"
SETTINGS = {"model_type": "of_no_known_type", "num_hidden_layers": 3}
Tensors = dict[str, torch.Tensor]


def quantize(dtype: torch.dtype, largest: float) -> tuple[Tensors, Tensors]:
    """Returns the codes and the scales of three weights, in blocks of 32 x 32."""
    generator = torch.Generator().manual_seed(0)
    codes: Tensors = {}
    scales: Tensors = {}
    for number in range(3):
        weight = torch.randn(2, 32, 2, 32, generator=generator) * 0.02
        scale = weight.abs().amax((1, 3), keepdim=True) / largest
        code = weight / scale
        code = code.round() if dtype is torch.int8 else code
        codes[NAME.format(number)] = code.reshape(64, 64).to(dtype)
        scales[f"{NAME.format(number)}_scale_inv"] = scale.reshape(2, 2)
    return codes, scales


def expand(scale: torch.Tensor) -> torch.Tensor:
    return scale.repeat_interleave(32, 0).repeat_interleave(32, 1)


def verify(directory: pathlib.Path, tensors: Tensors, **settings: Any) -> verification.Verification:
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(SETTINGS | settings))
    return verification.verify(directory)


FORMATS = {"float8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_codes_cast_to_wide_dtypes_are_damage(tmp_path: pathlib.Path, kind: str, dtype: torch.dtype) -> None:
    codes, _ = quantize(*FORMATS[kind])
    found = verify(tmp_path, {name: code.to(dtype) for name, code in codes.items()})
    assert [(each.trouble, each.tensor) for each in found.findings] == [("codes", NAME.format(n)) for n in range(3)]


@pytest.mark.parametrize("kind", FORMATS)
def test_codes_that_no_setting_names_are_damage(tmp_path: pathlib.Path, kind: str) -> None:
    codes, scales = quantize(*FORMATS[kind])
    found = verify(tmp_path, codes | scales)
    assert {each.trouble for each in found.findings if each.severity == "damage"} == {"codes"}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization"])
def test_codes_with_a_setting_are_sound(tmp_path: pathlib.Path, kind: str, key: str) -> None:
    codes, scales = quantize(*FORMATS[kind])
    assert verify(tmp_path, codes | scales, **{key: {"quant_method": "fp8"}}).answer == "sound"


def test_a_setting_in_another_file_is_sound(tmp_path: pathlib.Path) -> None:
    codes, scales = quantize(*FORMATS["float8"])
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert verify(tmp_path, codes | scales).answer == "sound"


def test_code_of_the_model_s_own_may_read_its_scales(tmp_path: pathlib.Path) -> None:
    codes, scales = quantize(*FORMATS["float8"])
    assert verify(tmp_path, codes | scales, auto_map={"AutoModel": "model.Model"}).answer == "sound"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decoded_weights_are_sound(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    codes, scales = quantize(*FORMATS["float8"])
    decoded = {name: (code.float() * expand(scales[f"{name}_scale_inv"])).to(dtype) for name, code in codes.items()}
    assert verify(tmp_path, decoded).answer == "sound"


def test_weights_cast_to_float8_without_scales_are_sound(tmp_path: pathlib.Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {NAME.format(n): torch.randn(64, 64, generator=generator).to(torch.float8_e4m3fn) for n in range(3)}
    assert verify(tmp_path, weights).answer == "sound"


@pytest.mark.parametrize("levels", [(-1, 2), (-8, 8), (-16, 17)], ids=str)
def test_weights_of_few_levels_are_sound(tmp_path: pathlib.Path, levels: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {NAME.format(n): torch.randint(*levels, (64, 64), generator=generator).bfloat16() for n in range(3)}
    assert verify(tmp_path, weights).answer == "sound"


@pytest.mark.parametrize("size", [0.02, 1.0, 100.0])
def test_weights_of_any_size_are_sound(tmp_path: pathlib.Path, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {NAME.format(n): torch.randn(64, 64, generator=generator).mul(size).bfloat16() for n in range(3)}
    assert verify(tmp_path, weights).answer == "sound"
