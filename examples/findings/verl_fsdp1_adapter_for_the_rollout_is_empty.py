"""verl, FSDP1 and LoRA: collect_lora_params, which the rollout's adapter is taken from, gives no tensor.

torchrun --nproc-per-node 2 verl_fsdp1_adapter_for_the_rollout_is_empty.py    on accelerators
"""

import os

import peft
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from verl.utils.device import get_device_name, get_nccl_backend, get_torch_device
from verl.utils.fsdp_utils import collect_lora_params


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(64, 64)


rank, kind = int(os.environ["LOCAL_RANK"]), get_device_name()
get_torch_device().set_device(rank)
dist.init_process_group(f"cpu:gloo,{kind}:{get_nccl_backend()}")
lora = peft.LoraConfig(r=4, target_modules=["proj"])
with_adapter = peft.get_peft_model(nn.Sequential(Block(), Block()), lora)
there = sum("lora_" in name for name in with_adapter.state_dict())
module = FullyShardedDataParallel(
    with_adapter.to(kind), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=rank
)
given = len(collect_lora_params(module, layered_summon=False, base_sync_done=True))

wrong = given < there
word = "wrong" if wrong else "right"
print(f"{word}: rank {rank}: of {there} tensors of the adapter the rollout is given {given}", flush=True)
dist.destroy_process_group()
print("shown" if wrong else "not shown", flush=True)
