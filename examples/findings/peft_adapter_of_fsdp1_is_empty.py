"""peft and FSDP1: the adapter that is taken out of a prepared model is empty, so that a file of it has no weights.

torchrun --nproc-per-node 2 peft_adapter_of_fsdp1_is_empty.py    on accelerators
"""

import peft
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(64, 64)

    def forward(self, x):
        return self.proj(x)


accelerator = Accelerator(
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=1,
        state_dict_type="FULL_STATE_DICT",
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )
)
with_adapter = peft.get_peft_model(nn.Sequential(Block(), Block()), peft.LoraConfig(r=4, target_modules=["proj"]))
model = accelerator.prepare(with_adapter)
full = accelerator.get_state_dict(model)
adapter = peft.get_peft_model_state_dict(accelerator.unwrap_model(model), state_dict=full)
wrong = False
if accelerator.is_main_process:
    there = sum("lora_" in name for name in full)
    wrong = len(adapter) < there
    word = "wrong" if wrong else "right"
    print(f"{word}: of {there} tensors of the adapter get_peft_model_state_dict gives {len(adapter)}")
accelerator.end_training()
print("shown" if wrong else "not shown", flush=True)
