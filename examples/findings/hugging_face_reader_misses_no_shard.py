"""dcp.load of a sharded Hugging Face checkpoint without one of its files returns, and weights are what they were.

torchrun --nproc-per-node 2 hugging_face_reader_misses_no_shard.py
"""

import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
where = [tempfile.mkdtemp()]
dist.broadcast_object_list(where)
state = {"weight": distribute_tensor(torch.full((8, 8), 2.0), mesh, [Shard(0)])}
dcp.save(state, storage_writer=HuggingFaceStorageWriter(where[0], save_distributed=True))
if dist.get_rank() == 0:
    next(pathlib.Path(where[0]).glob("shard-00001-*")).unlink()  # of two
dist.barrier()

state = {"weight": distribute_tensor(torch.zeros(8, 8), mesh, [Shard(0)])}
dcp.load(state, storage_reader=HuggingFaceStorageReader(where[0]))
full = state["weight"].full_tensor()
if dist.get_rank() == 0:
    print(f"dcp.load returned; of {full.numel()} weights that were saved as 2 {int((full == 0).sum())} are still 0")
dist.destroy_process_group()
print("shown" if (full == 0).any() else "not shown", flush=True)
