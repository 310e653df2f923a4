"""The state dict of a bitsandbytes layer under fully_shard has the 4-bit codes, and none of their scales.

torchrun --nproc-per-node 2 state_dict_of_4bit_fsdp2_has_no_scales.py    on the CPU; needs bitsandbytes
A strict load into another layer succeeds, and the layer multiplies the loaded codes with the scales of its own weights.
"""

import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")


def make_layer(seed: int, size: float) -> torch.nn.Module:
    torch.manual_seed(seed)
    layer = Linear4bit(64, 64, bias=False, quant_type="nf4", quant_storage=torch.float32)
    layer.weight.data *= size
    return torch.nn.Sequential(layer).to("cpu")  # quantizes


batch = torch.ones(1, 64)
model, other = make_layer(0, 1.0), make_layer(1, 3.0)
before = set(model.state_dict())
expected = model(batch)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
saved = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
other.load_state_dict(saved, strict=True)
factor = float(other(batch).norm() / expected.norm())
lost = before - set(saved)
if dist.get_rank() == 0:
    print(f"{len(lost)} of {len(before)} entries are lost; the loaded layer puts out {factor:.2f} times as much")
    print("shown" if lost and abs(factor - 1) > 0.1 else "not shown", flush=True)
