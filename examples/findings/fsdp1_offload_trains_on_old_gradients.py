"""FSDP1 under CPUOffload: after a forward that raised, the next step trains with the gradients of the step before.

torchrun --nproc-per-node 2 fsdp1_offload_trains_on_old_gradients.py    on accelerators
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device.index)
dist.init_process_group(f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
model[0] = FullyShardedDataParallel(model[0], device_id=device, cpu_offload=CPUOffload(True))
model = FullyShardedDataParallel(model, device_id=device, cpu_offload=CPUOffload(True))
(shard,) = model.module[0].parameters()


def step(scale):
    model(torch.full((2, 8), scale, device=device)).sum().backward()
    gradient = shard.grad.clone()
    model.zero_grad()
    return gradient


right, before = step(2.0), step(1.0)
hook = model.module[1].register_forward_hook(lambda *_: 1 / 0)
try:
    step(2.0)
except ZeroDivisionError:
    hook.remove()
found = step(2.0)
print(f"rank {dist.get_rank()}: right {torch.equal(found, right)}, as in the step before {torch.equal(found, before)}")
dist.destroy_process_group()
print("shown" if not torch.equal(found, right) else "not shown", flush=True)
