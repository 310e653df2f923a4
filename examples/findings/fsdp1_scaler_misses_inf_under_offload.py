"""Under CPUOffload ShardedGradScaler forgets that a gradient is infinite, and the optimizer takes the step.

torchrun --nproc-per-node 2 fsdp1_scaler_misses_inf_under_offload.py    on accelerators
On a GPU it is a race: work is queued first, so that the scaler's copies to the host are still to come when it goes on.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

dist.init_process_group()
kind = torch.accelerator.current_accelerator() or torch.device("cpu")
device = torch.device(kind.type, dist.get_rank() % torch.accelerator.device_count())
torch.accelerator.set_device_index(device.index)
model = FullyShardedDataParallel(
    nn.Linear(16, 16, bias=False), device_id=device, cpu_offload=CPUOffload(offload_params=True)
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = ShardedGradScaler(device=kind.type, init_scale=2.0**16)

scaler.scale(model(torch.full((1, 16), 1e38, device=device)).sum()).backward()
(gradient,) = (parameter.grad for parameter in model.parameters())
infinite = gradient is not None and bool(gradient.isinf().all())
size = 8192 if kind.type == "cuda" else 8
busy = torch.ones(size, size, device=device)
for _ in range(200):
    busy = busy @ busy
scaler.step(optimizer)
scaler.update()

weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
finite = bool(weights.isfinite().all())
print(f"rank {dist.get_rank()}: infinite gradients: {infinite}; the scale is {scaler.get_scale()}, not {2.0**15}")
print(f"rank {dist.get_rank()}: weights {'kept' if finite else 'lost'}: {weights[:3]}")
missed: list[bool] = [False] * dist.get_world_size()
dist.all_gather_object(missed, infinite and (scaler.get_scale() != 2.0**15 or not finite))
dist.destroy_process_group()
print("shown" if any(missed) else "not shown", flush=True)
