"""Megatron-FSDP: fully_shard trains parameters that the optimizer was not given, with the default learning rate.

torchrun --nproc-per-node 2 megatron_fsdp_drops_parameter_groups.py    on accelerators
"""

import os

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard
from torch import nn


class Unit(nn.Linear):
    pass


device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device)
dist.init_process_group()

body, head = nn.Linear(8, 8), Unit(8, 8)
optimizer = torch.optim.SGD([{"params": head.parameters(), "lr": 0.5}], lr=0.1)
given = [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
model, optimizer = fully_shard(nn.Sequential(body, head), optimizer, fsdp_unit_modules=[Unit], device=device)
left = [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]

before = [parameter.to_local().clone() for parameter in body.parameters()]
model(torch.ones(1, 8, device=device)).sum().backward()
optimizer.step()
moved = sum(int((a != b.to_local()).sum()) for a, b in zip(before, body.parameters(), strict=True))
wrong = "wrong" if given != left or moved else "right"
said = f"(parameters, lr) {given} became {left}; {moved} values of others moved"
print(f"{wrong}: rank {dist.get_rank()}: {said}", flush=True)
dist.destroy_process_group()
print("shown" if wrong == "wrong" else "not shown", flush=True)
