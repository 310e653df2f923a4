"""set_model_state_dict puts DTensors into the caller's full dictionary, so that it can be loaded once.

torchrun --nproc-per-node 2 full_dictionary_becomes_sharded.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.Linear(4, 4, bias=False))
fully_shard(model, mesh=mesh)
full = {"0.weight": torch.ones(4, 4)} if dist.get_rank() == 0 else {}
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, full, options=options)
kinds = {name: type(value).__name__ for name, value in full.items()}
rank = dist.get_rank()
print(f"rank {rank}: the caller's dictionary holds {kinds}")
dist.destroy_process_group()
print("shown" if kinds == {"0.weight": "DTensor"} else "not shown", flush=True)
