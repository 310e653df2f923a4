"""Megatron-FSDP: fully_shard decays the weights, and counts an optimizer step that nobody has made.

torchrun --nproc-per-node 2 megatron_fsdp_makes_a_step_of_its_own.py    on accelerators
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

model = Unit(8, 8)
nn.init.ones_(model.weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
model, optimizer = fully_shard(nn.Sequential(model), optimizer, fsdp_unit_modules=[Unit], device=device)

steps = {float(state["step"]) for state in optimizer.state.values()}
weights = {round(float(value), 4) for value in model.module[0].weight.to_local().flatten()}
wrong = "wrong" if steps - {0.0} or weights - {1.0} else "right"
said = f"weights that were 1 are {weights or 'elsewhere'}, and the steps {steps}"
print(f"{wrong}: rank {dist.get_rank()}: {said}", flush=True)
dist.destroy_process_group()
print("shown" if wrong == "wrong" else "not shown", flush=True)
