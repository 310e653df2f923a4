"""FSDP1 with use_orig_params: a move to the CPU and back restores gradients that zero_grad() has dropped.

torchrun --nproc-per-node 2 fsdp1_move_brings_gradients_back.py    on accelerators
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device.index)
dist.init_process_group(f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}")
model = FullyShardedDataParallel(nn.Linear(8, 2, bias=False), device_id=device, use_orig_params=True)
weight = model.module.weight
batch = torch.full((1, 8), dist.get_rank() + 1.0, device=device)
model(batch).sum().backward()
right = weight.grad.clone()
model.zero_grad()
model.to("cpu")
model.to(device)
print(f"rank {dist.get_rank()}: after zero_grad() and the move the gradient is {weight.grad}")
model(batch).sum().backward()
print(f"rank {dist.get_rank()}: the next backward gives {(weight.grad / right).unique().tolist()} times the gradient")
dist.destroy_process_group()
print("shown" if not torch.equal(weight.grad, right) else "not shown", flush=True)
