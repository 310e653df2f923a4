"""accelerate, FSDP2, FULL_STATE_DICT and offload: save_state of a model with a buffer cannot be loaded.

torchrun --nproc-per-node 2 accelerate_fsdp2_buffer_breaks_full_load_state.py    on accelerators
"""

import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

accelerator = Accelerator(
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="FULL_STATE_DICT", cpu_offload=True, auto_wrap_policy="NO_WRAP"
    )
)
model = nn.Linear(64, 64)
model.register_buffer("scale", torch.ones(1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
directory = [tempfile.mkdtemp()]
dist.broadcast_object_list(directory, src=0)
accelerator.save_state(directory[0])
try:
    accelerator.load_state(directory[0])
    wrong, said = False, "load_state loaded what save_state saved"
except Exception as error:
    wrong, said = True, f"load_state of what save_state saved: {type(error).__name__}: {error}"
print(f"{'wrong' if wrong else 'right'}: rank {accelerator.process_index}: {said}", flush=True)
print("shown" if wrong else "not shown", flush=True)
