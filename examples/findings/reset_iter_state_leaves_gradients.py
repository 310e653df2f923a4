"""FSDP2, torch 2.13: reset_iter_state() after a raised backward leaves gradients, to which the next backward adds.

torchrun --nproc-per-node 2 reset_iter_state_leaves_gradients.py    on CPU ranks
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
mesh, model = init_device_mesh("cpu", (2,)), nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
head = dict(model.named_parameters())["2.weight"]


def step():
    model(torch.ones(2, 8)).sum().backward()
    gradient = head.grad.full_tensor()
    optimizer.zero_grad()
    return gradient


right = step()
hook = model[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
try:
    step()
except ZeroDivisionError:
    hook.remove()
optimizer.zero_grad()
model.reset_iter_state()
found = step()
print(f"the gradient of 2.weight is {(found / right).mean().item():.2f} times what it should be")
dist.destroy_process_group()
print("shown" if not torch.equal(found, right) else "not shown", flush=True)
