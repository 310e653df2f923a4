"""dcp.save takes other experts of the same name for replicas: after the load no rank has both of its tensors back.

torchrun --nproc-per-node 2 hidden_experts_mixed_by_dcp.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("experts", "fsdp"))
# Each rank has experts of its own, as after expert parallelism that does not use DTensor; FSDP sees the other dim.
model = nn.ParameterDict(
    {"gate_up": nn.Parameter(torch.full((4, 8), float(rank))), "down": nn.Parameter(torch.full((4, 4), float(rank)))}
)
fully_shard(model, mesh=mesh["fsdp"])
directory = [tempfile.mkdtemp()]
dist.broadcast_object_list(directory)
dcp.save(get_model_state_dict(model), checkpoint_id=directory[0])
with torch.no_grad():
    for parameter in model.parameters():
        parameter.to_local().fill_(-1)
state = get_model_state_dict(model)
dcp.load(state, checkpoint_id=directory[0])
set_model_state_dict(model, state)
loaded = {name: int(parameter.to_local()[0, 0]) for name, parameter in model.named_parameters()}
print(f"rank {rank} has the experts of rank {loaded}")
lost = torch.tensor(int(set(loaded.values()) != {rank}))
dist.all_reduce(lost)
dist.destroy_process_group()
print("shown" if lost > 0 else "not shown", flush=True)
