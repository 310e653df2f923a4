"""accelerate, FSDP1 and SHARDED_STATE_DICT: load_state in a new run silently restores no optimizer state.

torchrun --nproc-per-node 2 accelerate_fsdp1_sharded_resume_loses_optimizer.py    on accelerators; exit code 1: it does.
"""

import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

accelerator = Accelerator(
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=1, state_dict_type="SHARDED_STATE_DICT", use_orig_params=True, auto_wrap_policy="NO_WRAP"
    )
)


def started():
    """A model and its optimizer, the model prepared first, as accelerate asks for with FSDP1."""
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(64, 64))
    return model, accelerator.prepare(torch.optim.AdamW(model.parameters()))


def restored(optimizer):
    return sum(1 for state in optimizer.optimizer.state.values() if "exp_avg" in state)


model, optimizer = started()
accelerator.backward(model(torch.ones(4, 64, device=accelerator.device)).square().sum())
optimizer.step()
directory = [tempfile.mkdtemp()]
dist.broadcast_object_list(directory, src=0)
saved = restored(optimizer)
accelerator.save_state(directory[0])

accelerator._models.clear()  # what a new process starts with
accelerator._optimizers.clear()
model, optimizer = started()
accelerator.load_state(directory[0])
loaded = restored(optimizer)

wrong = loaded < saved
word = "wrong" if wrong else "right"
print(f"{word}: rank {accelerator.process_index} saved the state of {saved} parameters, load_state restored {loaded}")
accelerator.end_training()
raise SystemExit(wrong)
