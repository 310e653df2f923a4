"""FSDP1: a unit under CPUOffload below a root without it trains on gradients that are still being copied to the host.

torchrun --nproc-per-node 2 fsdp1_partly_offloaded_trains_on_unfinished_gradients.py    on accelerators
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device.index)
dist.init_process_group(f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}")
size = 8192 if device.type == "cuda" else 8
model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, 8))
model[0] = FullyShardedDataParallel(model[0], device_id=device, cpu_offload=CPUOffload(True))
model = FullyShardedDataParallel(model, device_id=device)  # with cpu_offload=CPUOffload(True), too, nothing is lost
(shard,) = model.module[0].parameters()
read, wrong = 0, 0
for scale in (1.0, 2.0, 3.0):
    model(torch.full((2, size), scale, device=device)).sum().backward()
    gradient = shard.grad.clone()  # as optimizer.step() reads it
    torch.accelerator.synchronize()
    read += gradient.numel()
    wrong += int((gradient != shard.grad).sum())
    model.zero_grad()
print(f"rank {dist.get_rank()}: of {read} elements of the gradient that a step would read {wrong} are not its own")
dist.destroy_process_group()
print("shown" if wrong else "not shown", flush=True)
