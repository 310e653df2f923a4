"""The remedies of findings that torch alone can try, in one process."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
_NAMES = [f"layers.{number}.weight" for number in range(8)]


def _save(directory: pathlib.Path, value: float, first_file: int) -> None:
    files = {name: first_file + number for number, name in enumerate(_NAMES)}
    writer = HuggingFaceStorageWriter(str(directory), files)
    dcp.save({name: torch.full((2, 2), value) for name in _NAMES}, storage_writer=writer, no_dist=True)


def _count_of(directory: pathlib.Path, value: float) -> int:
    loaded = {name: torch.zeros(2, 2) for name in _NAMES}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    return sum(bool(tensor.eq(value).all()) for tensor in loaded.values())


def test_a_save_into_an_empty_directory_is_loaded_as_it_was_saved(tmp_path: pathlib.Path) -> None:
    _save(tmp_path / "first", 1.0, 1)
    _save(tmp_path / "second", 2.0, 2)
    assert (_count_of(tmp_path / "first", 1.0), _count_of(tmp_path / "second", 2.0)) == (8, 8)


def test_scales_that_are_asked_for_make_weights_of_codes(tmp_path: pathlib.Path) -> None:
    codes = torch.tensor([[32.0, -8.0]]).to(torch.float8_e4m3fn)
    tensors = {"linear.weight": codes, "linear.weight_scale": torch.tensor([[1 / 64]])}
    save_file(tensors, tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    state = {"linear.weight": torch.zeros(1, 2), "linear.weight_scale": torch.zeros(1, 1)}
    dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    state["linear.weight"] *= state["linear.weight_scale"]
    assert state["linear.weight"].tolist() == [[0.5, -0.125]]
