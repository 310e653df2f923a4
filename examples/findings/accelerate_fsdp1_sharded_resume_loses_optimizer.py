"""accelerate, FSDP1 and SHARDED_STATE_DICT: load_state in a new run silently restores no optimizer state.

torchrun --nproc-per-node 2 accelerate_fsdp1_sharded_resume_loses_optimizer.py    on accelerators
"""

import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

sharded = {"fsdp_version": 1, "state_dict_type": "SHARDED_STATE_DICT", "auto_wrap_policy": "NO_WRAP"}
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(use_orig_params=True, **sharded))


def start():
    """A model and its optimizer, the model prepared first, as accelerate asks for with FSDP1."""
    model = accelerator.prepare(nn.Linear(64, 64))
    return model, accelerator.prepare(torch.optim.AdamW(model.parameters()))


model, optimizer = start()
accelerator.backward(model(torch.ones(4, 64, device=accelerator.device)).square().sum())
optimizer.step()
directory = [tempfile.mkdtemp()]
dist.broadcast_object_list(directory, src=0)
accelerator.save_state(directory[0])
saved = sum("exp_avg" in state for state in optimizer.optimizer.state.values())

accelerator.free_memory()  # and begin again, as a new process does
model, optimizer = start()
accelerator.load_state(directory[0])
loaded = sum("exp_avg" in state for state in optimizer.optimizer.state.values())
word = "wrong" if loaded < saved else "right"
print(f"{word}: rank {accelerator.process_index} saved the state of {saved} parameters, load_state restored {loaded}")
accelerator.end_training()
print("shown" if loaded < saved else "not shown", flush=True)
