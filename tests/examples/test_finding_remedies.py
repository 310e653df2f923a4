"""The remedies of findings about torch's Hugging Face checkpoints."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from program import run
from safetensors.torch import save_file
from support.forked import run_script
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
_PLANNED = """
import pathlib, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
directory, planner = pathlib.Path(sys.argv[1]), DefaultSavePlanner(dedup_save_to_lowest_rank=True)
full = {f"layers.{number}.weight": torch.ones(4, 4) for number in range(16)}
dcp.save(full, storage_writer=HuggingFaceStorageWriter(str(directory / "full")), planner=planner)
mesh = init_device_mesh("cpu", (2,))
sharded = {"weight": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])}
dcp.save(sharded, storage_writer=HuggingFaceStorageWriter(str(directory / "sharded"), save_distributed=True))
if dist.get_rank() == 0:
    (whole,) = map(load_file, (directory / "full").glob("*.safetensors"))
    shards = map(load_file, (directory / "sharded").glob("*.safetensors"))
    print(len(whole), sum(len(shard["weight"]) for shard in shards))
dist.destroy_process_group()
"""
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


def test_a_planner_for_full_tensors_and_shards_of_their_own_lose_nothing(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_PLANNED)
    done = run_script(script, "cpu", arguments=[str(tmp_path)])
    assert set(done.codes) == {0}, done.output
    assert "16 4" in done.output.splitlines()


def test_verify_names_the_shard_that_is_missing(tmp_path: pathlib.Path) -> None:
    for rank in (1, 2):
        place = {"weight": {"saved_offsets": [2 * (rank - 1), 0]}}
        file = tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors"
        save_file({"weight": torch.ones(2, 4)}, file, metadata={"DCP_SHARDING_INFO": json.dumps(place)})
    next(tmp_path.glob("shard-00001-*")).unlink()
    done = run(sys.executable, "-m", "fsdp_doctor", "checkpoint", "verify", str(tmp_path))
    assert "the file of shard 1 is missing" in " ".join(done.stdout.split()), done


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
