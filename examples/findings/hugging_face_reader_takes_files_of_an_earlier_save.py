"""dcp.load takes tensors from files that an earlier dcp.save has left in the directory, though the index names others.

torchrun --nproc-per-node 1 hugging_face_reader_takes_files_of_an_earlier_save.py
"""

import json
import pathlib
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

directory = pathlib.Path(tempfile.mkdtemp())
names = [f"layers.{number}.weight" for number in range(16)]
for value, first in ((1.0, 1), (2.0, 2)):  # the second save has one file more, so that all have other names
    files = {name: first + number for number, name in enumerate(names)}
    writer = HuggingFaceStorageWriter(str(directory), files)
    dcp.save({name: torch.full((4, 4), value) for name in names}, storage_writer=writer, no_dist=True)

index = json.loads((directory / "model.safetensors.index.json").read_text())
named = set(index["weight_map"].values())
loaded = {name: torch.zeros(4, 4) for name in names}
dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
wrong = sum(not tensor.eq(2).all() for tensor in loaded.values())
print(f"{len(list(directory.glob('*.safetensors')))} files, of which the index names {len(named)}")
print(f"of {len(names)} tensors {wrong} are loaded as the save before had them")
print("shown" if wrong else "not shown", flush=True)
