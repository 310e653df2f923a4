"""Trainer: fsdp_config={"fsdp_offload_params": True}, accelerate's own name, is accepted and offloads nothing.

torchrun --nproc-per-node 2 trainer_ignores_fsdp_offload_params.py    on accelerators
"""

import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

config = {"version": 2, "fsdp_offload_params": True}
backends = "cuda:nccl,cpu:gloo"  # the clipping of gradients on the CPU needs the latter
arguments = TrainingArguments(tempfile.mkdtemp(), fsdp=True, fsdp_config=config, ddp_backend=backends, report_to=[])
plugin = Trainer(model=nn.Linear(8, 8), args=arguments).accelerator.state.fsdp_plugin
offload = type(plugin.cpu_offload).__name__
wrong = offload != "CPUOffloadPolicy"
word = "wrong" if wrong else "right"
print(f"{word}: with fsdp_offload_params=True accelerate's plugin has {offload}", flush=True)
torch.distributed.barrier()  # a rank that is still connecting must find its peer
torch.distributed.destroy_process_group()
print("shown" if wrong else "not shown", flush=True)
