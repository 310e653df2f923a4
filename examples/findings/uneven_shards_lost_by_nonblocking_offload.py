"""FSDP2 loses a shard that is shorter than the others' when the model goes to the CPU without blocking.

torchrun --nproc-per-node 2 uneven_shards_lost_by_nonblocking_offload.py    on accelerators
On a GPU it is a race: work is queued first, so that the copies to the host are still to come when it goes on.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
kind = torch.accelerator.current_accelerator()
assert kind is not None
device = torch.device(kind.type, dist.get_rank() % torch.accelerator.device_count())
torch.accelerator.set_device_index(device.index)
mesh = init_device_mesh(kind.type, (dist.get_world_size(),))
size = 4096 if kind.type == "cuda" else 64
model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(4)), nn.Linear(size, 3, bias=False)).to(device)
fully_shard(model, mesh=mesh)
uneven = model[4].weight
before = uneven.to_local().cpu().clone()

busy = torch.ones(2 * size, 2 * size, device=device)
for _ in range(200):
    busy = busy @ busy
model.to("cpu", non_blocking=True)
torch.accelerator.synchronize()

after = model[4].weight.to_local()
lost = not torch.equal(before, after)
print(
    f"rank {dist.get_rank()}: {tuple(before.shape)} of (3, {size}), {'lost' if lost else 'kept'}: {after.flatten()[:3]}"
)
lost_somewhere: list[bool] = [False] * dist.get_world_size()
dist.all_gather_object(lost_somewhere, lost)
dist.destroy_process_group()
print("shown" if any(lost_somewhere) else "not shown", flush=True)
