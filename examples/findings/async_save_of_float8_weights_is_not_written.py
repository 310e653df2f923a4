"""dcp.async_save stages a weight that torchao gathers in float8 as memory into which nothing was written.

torchrun --nproc-per-node 2 async_save_of_float8_weights_is_not_written.py    on the CPU; needs torchao
dcp.save writes the same state dict right.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
expected = model[0].weight.detach().clone()
convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
directory = [tempfile.mkdtemp()]
dist.broadcast_object_list(directory)

wrong = {}
for save in (dcp.save, dcp.async_save):
    path = f"{directory[0]}/{save.__name__}"
    saving = save(model.state_dict(), checkpoint_id=path)
    if save is dcp.async_save:
        saving.result()
    saved = {"0.weight": torch.empty(64, 64)}
    dcp.load(saved, checkpoint_id=path)
    wrong[save.__name__] = int((saved["0.weight"] != expected).sum())
if dist.get_rank() == 0:
    print(f"of {expected.numel()} elements are wrong: " + ", ".join(f"{name} {n}" for name, n in wrong.items()))
    print("shown" if wrong["async_save"] and not wrong["save"] else "not shown", flush=True)
