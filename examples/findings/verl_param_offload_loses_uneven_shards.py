"""verl, FSDP2 and param_offload: offload_fsdp2_model_to_cpu and load_fsdp2_model_to_gpu lose shards of uneven tensors.

torchrun --nproc-per-node 2 verl_param_offload_loses_uneven_shards.py    on accelerators
On a GPU it is a race: the device is kept busy before the offload, so that the copies are still under way.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.utils.device import get_device_name, get_nccl_backend, get_torch_device
from verl.utils.fsdp_utils import load_fsdp2_model_to_gpu, offload_fsdp2_model_to_cpu

rank, kind = int(os.environ["LOCAL_RANK"]), get_device_name()
get_torch_device().set_device(rank)
dist.init_process_group(f"cpu:gloo,{kind}:{get_nccl_backend()}")
size = 4096 if kind == "cuda" else 64
model = nn.Linear(size, size + 1, device=kind)
fully_shard(model, mesh=init_device_mesh(kind, (dist.get_world_size(),)))
before = model.weight.to_local().cpu().clone()

busy = torch.ones(size, size, device=kind)
for _ in range(40):
    busy = busy @ busy * 0
offload_fsdp2_model_to_cpu(model)
load_fsdp2_model_to_gpu(model)
get_torch_device().synchronize()
after = model.weight.to_local().cpu()

lost = int((before != after).sum())
lost_anywhere = [0] * dist.get_world_size()
dist.all_gather_object(lost_anywhere, lost)
wrong = any(lost_anywhere)
print(f"{'wrong' if wrong else 'right'}: rank {rank} lost {lost} of {before.numel()} values of its shard", flush=True)
dist.destroy_process_group()
print("shown" if wrong else "not shown", flush=True)
