"""The Hugging Face directory that a framework is given is like the one that transformers writes."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fsdp_doctor.frameworks.adapter import PlainModel
from fsdp_doctor.machine.launch import Place


@pytest.mark.parametrize("name", ["qwen3", "tied", "uneven"])
def test_the_written_tensors_are_those_that_save_pretrained_writes(name: str, tmp_path: pathlib.Path) -> None:
    place = Place(rank=0, world_size=1, local_rank=0, num_nodes=1)
    plain = PlainModel(name=name, weights="own", device=torch.device("cpu"), place=place, workspace=tmp_path)
    module: Any = plain.build_module()
    module.save_pretrained(tmp_path / "expected")
    written = load_file(plain.write_pretrained() / "model.safetensors")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
