"""transformers: a model that is read with DistributedConfig(fsdp_cpu_offload=True) refuses its first forward.

torchrun --nproc-per-node 2 transformers_fsdp_cpu_offload_cannot_train.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.distributed import DistributedConfig

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
small = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=256, num_hidden_layers=2, head_dim=16, **sizes))
device = torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
with tempfile.TemporaryDirectory() as directory:
    small.save_pretrained(directory)  # each rank its own: it saves on rank 0 alone once there is a process group
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group()
    config = DistributedConfig(fsdp_size=dist.get_world_size(), fsdp_cpu_offload=True)
    model = AutoModelForCausalLM.from_pretrained(directory, distributed_config=config)
print(f"rank {dist.get_rank()}: shards on {sorted({str(shard.device) for shard in model.parameters()})}")
try:
    tokens = torch.arange(8, device=device).reshape(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    shown = False
except RuntimeError as error:
    shown = "materialized on CPU" in str(error)
    print(f"rank {dist.get_rank()}: {str(error).splitlines()[0]}")
print("shown" if shown else "not shown", flush=True)
