"""Megatron-FSDP: torch.nn.utils.clip_grad_norm_ does not end, as the ranks have gradients of different parameters.

torchrun --nproc-per-node 2 megatron_fsdp_clip_grad_norm_hangs.py    on accelerators
"""

import os
import threading

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_model
from torch import nn


class Unit(nn.Linear): ...


device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device)
dist.init_process_group()


def end(said, wrong):
    print(f"{'wrong' if wrong else 'right'}: rank {dist.get_rank()} {said}", flush=True)
    print("shown" if wrong else "not shown", flush=True)
    os._exit(0)


torch.manual_seed(0)
batch, plain = torch.ones(1, 8, device=device), nn.Sequential(nn.Linear(8, 8), Unit(8, 8)).to(device)
plain(batch).sum().backward()
right = float(torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()]))
plain.zero_grad()
model = fully_shard_model(plain, fsdp_unit_modules=[Unit], device=device)
model(batch).sum().backward()
held = [parameter.grad is not None for parameter in model.parameters()]
threading.Timer(20, end, (f"has gradients of parameters {held}: no norm after 20 s", True)).start()
norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())
end(f"has gradients of parameters {held}, and the norm {norm:.4f} of {right:.4f}", abs(norm - right) > 1e-3 * right)
