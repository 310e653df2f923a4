"""fully_shard after RowwiseParallel, a rank without a column: full_tensor() hangs on one rank, is wrong on another.

torchrun --nproc-per-node 2 fsdp2_forgets_the_shape_of_an_empty_tp_shard.py
"""

import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 7, bias=False))
weight = model[0].weight.detach().clone()
parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
before, right_before = model[0].weight.to_local().shape, torch.equal(model[0].weight.full_tensor(), weight)
fully_shard(model, mesh=mesh["dp"])
after = model[0].weight.to_local().shape
try:
    whole = model[0].weight.full_tensor()
    said = (
        f"full_tensor() has the shape {tuple(whole.shape)}, and is {'right' if torch.equal(whole, weight) else 'wrong'}"
    )
except RuntimeError as error:
    said = f"full_tensor() waits for the other rank: {str(error).splitlines()[0]}"
print(f"rank {dist.get_rank()}: right before: {right_before}; shard {tuple(before)}, then {tuple(after)}; {said}")
print("shown" if not said.endswith("right") else "not shown", flush=True)
