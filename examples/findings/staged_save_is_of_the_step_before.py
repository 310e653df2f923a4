"""dcp.async_save stages on a stream of its own, which does not wait for the step that is writing the weights.

torchrun --nproc-per-node 1 staged_save_is_of_the_step_before.py    on an accelerator
The checkpoint has the weights of before the step. On a GPU it is a race, which the first save of a process may win.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import fully_shard

kind = torch.accelerator.current_accelerator()
assert kind is not None
torch.accelerator.set_device_index(0)
dist.init_process_group(f"cpu:gloo,{kind.type}:{dist.get_default_backend_for_device(kind)}")
size = 4096 if kind.type == "cuda" else 64
model = torch.nn.Sequential(*(torch.nn.Linear(size, size, bias=False, device=kind) for _ in range(6)))
fully_shard(model)
batch, host = torch.rand(8 * size, size, device=kind), torch.empty(size, size).pin_memory()
stagers = []  # kept, since the end of one waits for the device

with tempfile.TemporaryDirectory() as directory:
    for step in (1.0, 2.0, 3.0):
        model(batch).square().mean().backward()
        for weight in (parameter.to_local().detach() for parameter in model.parameters()):
            # The emulated device runs kernels at once, and copies late.
            weight.fill_(step) if kind.type == "cuda" else weight.copy_(host.fill_(step), non_blocking=True)
        model.zero_grad()
        stagers.append(DefaultStager(StagingOptions()))
        save = dcp.async_save(model.state_dict(), checkpoint_id=f"{directory}/{step}", async_stager=stagers[-1])
        save.upload_completion.result()
        torch.accelerator.synchronize()
    saved = {name: torch.empty(size, size) for name in model.state_dict()}
    dcp.load(saved, checkpoint_id=f"{directory}/3.0")
old = sum(int((weight != 3).sum()) for weight in saved.values())
print(f"{'wrong' if old else 'right'}: {old} of {6 * size * size} weights were saved as they were before the step")
print("shown" if old else "not shown", flush=True)
