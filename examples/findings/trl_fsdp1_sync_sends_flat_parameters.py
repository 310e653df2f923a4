"""TRL, FSDP1 and use_orig_params=False: sync_weights gives vLLM flat parameters, under names that no model has.

torchrun --nproc-per-node 2 trl_fsdp1_sync_sends_flat_parameters.py    on accelerators
"""

from types import SimpleNamespace as Part

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

policy = ModuleWrapPolicy({nn.Linear})
plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=False, auto_wrap_policy=policy)
accelerator = Accelerator(fsdp_plugin=plugin)
plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
names = [name for name, _ in plain.named_parameters()]
received = []


class Generation(VLLMGeneration):  # in the place of vLLM's model, what records the names that it is given
    def __init__(self, model):
        vllm = Part(model=Part(load_weights=lambda pairs: received.extend(name for name, _ in pairs)))
        executor = Part(driver_worker=Part(model_runner=vllm))
        self.llm = Part(llm_engine=Part(model_executor=executor), reset_prefix_cache=lambda: None)
        self.model, self.accelerator, self._dist = model, accelerator, DistributedBackend(accelerator)
        self.mode, self.enable_sleep_mode = "colocate", False


generation = Generation(accelerator.prepare(plain))
generation.model(torch.ones(1, 8, device=accelerator.device)).sum().backward()
generation.sync_weights()

wrong = sorted(received) != sorted(names)
word = "wrong" if wrong else "right"
print(f"{word}: rank {accelerator.process_index}: vLLM was given {received}, the model has {names}")
accelerator.end_training()
print("shown" if wrong else "not shown", flush=True)
