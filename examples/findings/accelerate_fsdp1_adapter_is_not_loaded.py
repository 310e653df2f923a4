"""accelerate, FSDP1 and LoRA: load_fsdp_model(adapter_only=True), with which Trainer resumes, loads no adapter.

torchrun --nproc-per-node 2 accelerate_fsdp1_adapter_is_not_loaded.py    on accelerators
"""

import tempfile

import peft
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import load_fsdp_model, save_fsdp_model
from torch import nn

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=1, state_dict_type="FULL_STATE_DICT", use_orig_params=True, auto_wrap_policy="NO_WRAP"
)
accelerator = Accelerator(fsdp_plugin=plugin)
lora = peft.LoraConfig(r=4, target_modules=["0", "1"], init_lora_weights=False)
model = accelerator.prepare(peft.get_peft_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), lora))
adapter = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
directory = [tempfile.mkdtemp()]
dist.broadcast_object_list(directory, src=0)
save_fsdp_model(plugin, accelerator, model, directory[0], adapter_only=True)
accelerator.wait_for_everyone()
saved = len(torch.load(f"{directory[0]}/pytorch_model_fsdp.bin", weights_only=True))

before = [parameter.detach().clone() for parameter in adapter]
with torch.no_grad():
    for parameter in adapter:
        parameter.zero_()
result = load_fsdp_model(plugin, accelerator, model, directory[0], adapter_only=True)
equal = sum(torch.equal(parameter, values) for parameter, values in zip(adapter, before, strict=True) if len(values))
there = sum(len(values) > 0 for values in before)

unexpected = len(getattr(result, "unexpected_keys", ()))
print(f"rank {accelerator.process_index}: the file has {saved} tensors, {unexpected} of them unexpected")
print(f"rank {accelerator.process_index}: of {there} shards of the adapter {equal} were loaded")
accelerator.end_training()
print("shown" if equal < there else "not shown", flush=True)
