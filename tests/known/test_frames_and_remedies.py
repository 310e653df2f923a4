"""Frames of entries belong to a package or are functions, and remedies that are code work on the case they are for."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
from program import python_prints
from torch.distributed import checkpoint as dcp

from fsdp_doctor.known.catalogue import match_message, read_catalogue
from fsdp_doctor.known.signatures import find_anchor

_PACKAGES = ("torch", "safetensors", "peft", "vllm", "sglang", "accelerate", "transformers", "bitsandbytes", "verl")


def _list_files_of_another_package(pattern: re.Pattern[str]) -> list[str]:
    """Frames in files that have the pattern's words in their names, of a package that it cannot mean."""
    words = find_anchor(pattern).strip("/")
    package, _, rest = words.partition("/")
    words = rest if package in _PACKAGES else words
    if not words or not re.fullmatch(r"[\w/.-]+", words):
        return []
    names = (f"{words}.py", f"{words}/core.py", f"of_{words.replace('/', '_')}_too.py")
    return [f'File "/env/lib/python3.12/site-packages/another/{name}", line 7, in run' for name in names]


def test_no_frame_of_an_entry_is_a_file_of_another_package() -> None:
    loose = [
        (entry.id, pattern.pattern, frame)
        for entry in read_catalogue()
        for pattern in entry.frames
        for frame in _list_files_of_another_package(pattern)
        if pattern.search(frame)
    ]
    assert loose == []


def test_a_pattern_without_its_package_would_be_found() -> None:
    loose, anchored = re.compile(r"functional\.py"), re.compile(r"\btorch/nn/functional\.py")
    assert any(loose.search(frame) for frame in _list_files_of_another_package(loose))
    assert not any(anchored.search(frame) for frame in _list_files_of_another_package(anchored))


_PACKED = """
import bitsandbytes, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for storage, cast in ((torch.uint8, False), (torch.uint8, True), (torch.bfloat16, False)):
    layer = bitsandbytes.nn.Linear4bit(64, 128, bias=False, compute_dtype=torch.bfloat16, quant_storage=storage)
    weight = torch.randn(128, 64).bfloat16()
    layer.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_storage=storage, module=layer)
    layer.to("cpu")
    if cast:
        layer.weight.data = layer.weight.data.to(torch.bfloat16)
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), layer)
    try:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        print(tuple(model(torch.randn(4, 64).bfloat16()).shape))
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_packed_weights_are_stored_in_the_dtype_of_the_others() -> None:
    pytest.importorskip("bitsandbytes")
    failed, cast, remedied = python_prints(_PACKED).splitlines()[-3:]
    assert any(entry.id == "fsdp1-unit-of-packed-weights" for entry in match_message(failed.replace(" ", ": ", 1)))
    assert "Error" in cast
    assert remedied == "(4, 128)"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_names_in_a_checkpoint_are_read_as_in_the_remedy(tmp_path: pathlib.Path) -> None:
    dcp.save({"model.blocks.0.weight": torch.ones(2)}, checkpoint_id=tmp_path)
    template = {"model.layers.0.weight": torch.zeros(2)}
    with pytest.raises(BaseException, match=r"Missing key in checkpoint state_dict: model\.layers\.0\.weight"):
        dcp.load(template, checkpoint_id=tmp_path)
    saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert (template.keys() - saved.keys(), saved.keys() - template.keys()) == (
        {"model.layers.0.weight"},
        {"model.blocks.0.weight"},
    )
