"""FSDP1, tied weights and broadcast_from_rank0: every rank but rank 0 misses the second name, and rank 0 goes on.

torchrun --nproc-per-node 2 fsdp1_tied_key_is_missing_off_rank0.py    on accelerators
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


dist.init_process_group()
kind = torch.accelerator.current_accelerator()
assert kind is not None
device = torch.device(kind.type, dist.get_rank() % torch.accelerator.device_count())
torch.accelerator.set_device_index(device.index)
model = FullyShardedDataParallel(Tied(), device_id=device)
full = {name: torch.ones(8, 4) for name in ("embed.weight", "head.weight")} if dist.get_rank() == 0 else {}
try:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    said = str(set_model_state_dict(model, full, options=options))
except RuntimeError as error:
    said = " ".join(str(error).split())
print(f"rank {dist.get_rank()}: {said}", flush=True)
first = dist.get_rank() == 0
# No collective after this: the ranks are in different ones.
shown = "matched" in said if first else 'Missing key(s) in state_dict: "head.weight"' in said
print("shown" if shown else "not shown", flush=True)
