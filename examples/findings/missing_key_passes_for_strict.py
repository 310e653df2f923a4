"""set_model_state_dict accepts a full dictionary that lacks a parameter, with strict=True, and says that all matched.

torchrun --nproc-per-node 2 missing_key_passes_for_strict.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
rank = dist.get_rank()


def loaded(broadcast: bool, strict: bool) -> bool:
    """Whether the load reported nothing missing though "1.weight" was not in the dictionary."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    fully_shard(model, mesh=mesh)
    before = model[1].weight.full_tensor().clone()
    full = {"0.weight": torch.ones(4, 4)} if rank == 0 or not broadcast else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=strict)
    try:
        result = set_model_state_dict(model, full, options=options)
    except RuntimeError:
        return False
    assert model[0].weight.full_tensor().eq(1).all()
    assert model[1].weight.full_tensor().equal(before)
    if rank == 0:
        print(f"broadcast={broadcast}, strict={strict}: {result}, and 1.weight is what it was")
    return not result.missing_keys


shown = [loaded(broadcast=False, strict=True), loaded(broadcast=True, strict=False)]
dist.destroy_process_group()
print("shown" if any(shown) else "not shown", flush=True)
