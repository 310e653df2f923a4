"""set_model_state_dict(broadcast_from_rank0=True, strict=True) refuses an unexpected key on rank 0 alone.

torchrun --nproc-per-node 2 unexpected_key_on_rank0_alone.py
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
full = {"0.weight": torch.ones(4, 4), "extra.weight": torch.ones(2, 2)} if dist.get_rank() == 0 else {}
try:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    said = str(set_model_state_dict(model, full, options=options))
except RuntimeError as error:
    said = str(error)
everyone: list[str] = [""] * dist.get_world_size()
dist.all_gather_object(everyone, said)
if dist.get_rank() == 0:
    for rank, words in enumerate(everyone):
        print(f"rank {rank}: {' '.join(words.split())}")
dist.destroy_process_group()
print("shown" if "Unexpected key" in everyone[0] and "matched" in everyone[1] else "not shown", flush=True)
