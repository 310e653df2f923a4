"""Megatron-FSDP: after an evaluation, load_state_dict leaves old weights with which the next forward computes.

torchrun --nproc-per-node 2 megatron_fsdp_load_after_evaluation_keeps_old_weights.py    on accelerators
"""

import os

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard_model
from torch import nn


class Unit(nn.Linear): ...


device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
torch.accelerator.set_device_index(device)
dist.init_process_group()


def build(seed):
    torch.manual_seed(seed)
    return fully_shard_model(nn.Sequential(nn.Linear(8, 8), Unit(8, 8)), fsdp_unit_modules=[Unit], device=device)


batch = torch.ones(1, 8, device=device)
with torch.no_grad():
    saved, fresh, evaluated = build(0), build(1), build(1)
    evaluated(batch)
    for model in (fresh, evaluated):
        state = model.state_dict()
        for name, value in saved.state_dict().items():
            state[name].copy_(value)  # as dcp.load does
        model.load_state_dict(state, strict=False)
    expected = saved(batch)
    off_fresh, off = (float((model(batch) - expected).abs().max()) for model in (fresh, evaluated))
print(f"after the load the output is off by {off:.4f}, without an evaluation before it by {off_fresh:.4f}", flush=True)
dist.destroy_process_group()
print("shown" if off and not off_fresh else "not shown", flush=True)
