"""FSDP2: a backward raises, the job loads its checkpoint, and the next forward computes with the weights from before.

torchrun --nproc-per-node 2 raised_backward_keeps_old_weights.py    on CPU ranks
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
model, mesh = copy.deepcopy(plain), init_device_mesh("cpu", (2,))
for module in (*model, model):
    fully_shard(module, mesh=mesh)
shards = list(model.parameters())

hook = model[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
try:
    model(torch.ones(2, 8)).sum().backward()
except ZeroDivisionError:
    hook.remove()
for module in (*model, model):
    module.reshard()
checkpoint = {name: 2 * tensor for name, tensor in plain.state_dict().items()}
set_model_state_dict(model, dict(checkpoint), options=StateDictOptions(full_state_dict=True))
plain.load_state_dict(checkpoint)
output = model(torch.ones(2, 8))
output.sum().backward()
right = torch.allclose(output, plain(torch.ones(2, 8)))
trained = sum(shard.grad is not None for shard in shards)
print(f"the output is right: {right}; {trained} of {len(shards)} parameters have a gradient")
dist.destroy_process_group()
print("shown" if not right or trained < len(shards) else "not shown", flush=True)
