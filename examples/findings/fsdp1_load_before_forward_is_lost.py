"""FSDP1 on one GPU with CPU offload and use_orig_params forgets what was loaded before the first forward.

torchrun --nproc-per-node 1 fsdp1_load_before_forward_is_lost.py    on an accelerator
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision

dist.init_process_group()
kind = torch.accelerator.current_accelerator()
assert kind is not None
device = torch.device(kind.type, 0)
model = FullyShardedDataParallel(
    nn.Linear(4, 1, bias=False),
    device_id=device,
    use_orig_params=True,
    cpu_offload=CPUOffload(offload_params=True),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
)
print(model.load_state_dict({"weight": torch.full((1, 4), 2.0)}))
out = model(torch.ones(1, 4, device=device)).item()
weight = model.state_dict()["weight"].flatten().tolist()
print(f"the forward gives {out}, not 8; the weight is {weight}, not 2")
dist.destroy_process_group()
print("shown" if out != 8 and weight != [2.0] * 4 else "not shown", flush=True)
