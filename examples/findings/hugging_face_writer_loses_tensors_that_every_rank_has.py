"""dcp.save of what every rank has, by HuggingFaceStorageWriter's default: ranks write the same file, and half is lost.

torchrun --nproc-per-node 2 hugging_face_writer_loses_tensors_that_every_rank_has.py
"""

import json
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import HuggingFaceStorageWriter

dist.init_process_group("gloo")
where = [tempfile.mkdtemp()]
dist.broadcast_object_list(where)
directory = pathlib.Path(where[0])
state = {f"layers.{number}.weight": torch.ones(64, 64) for number in range(16)}  # full, on every rank
dcp.save(state, storage_writer=HuggingFaceStorageWriter(where[0]))

(name,) = set(json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"].values())
try:
    with safe_open(directory / name, framework="pt") as file:
        there = len(file.keys())
except SafetensorError:
    there = 0
print(f"dcp.save raised nothing; of {len(state)} tensors that the index says are in {name} it has {there}")
dist.destroy_process_group()
print("shown" if there < len(state) else "not shown", flush=True)
