"""Megatron-FSDP: torch.nn.utils.clip_grad_norm_ does not end, as the ranks have gradients of different parameters.

torchrun --nproc-per-node 2 megatron_fsdp_clip_grad_norm_hangs.py    on accelerators
"""

import os
import threading

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_model
from torch import nn


class Unit(nn.Linear):
    pass


device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device)
dist.init_process_group()


def end(said, wrong):
    print(f"{'wrong' if wrong else 'right'}: rank {dist.get_rank()} {said}", flush=True)
    print("shown" if wrong else "not shown", flush=True)
    os._exit(0)


plain = nn.Sequential(nn.Linear(8, 8), Unit(8, 8)).to(device)
for parameter in plain.parameters():
    dist.broadcast(parameter.data, 0)
model = fully_shard_model(plain, fsdp_unit_modules=[Unit], device=device)
model(torch.ones(1, 8, device=device)).sum().backward()
held = [parameter.grad is not None for parameter in model.parameters()]
threading.Timer(20, end, (f"has gradients of parameters {held}: no norm after 20 s", True)).start()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
end(f"has gradients of parameters {held}, and the norm {float(norm.full_tensor()):.4f}", not torch.isfinite(norm))
