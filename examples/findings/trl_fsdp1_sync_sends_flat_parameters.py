"""TRL, FSDP1 and use_orig_params=False: sync_weights gives vLLM flat parameters, under names that no model has.

torchrun --nproc-per-node 2 trl_fsdp1_sync_sends_flat_parameters.py    on accelerators; exit code 1: it does.
"""

from types import SimpleNamespace

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

accelerator = Accelerator(
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=1, use_orig_params=False, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
)
plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
names = [name for name, _ in plain.named_parameters()]
received = []
# No vLLM is needed to see what it would be given: an object with the method that sync_weights calls.
engine = SimpleNamespace(load_weights=lambda pairs: received.extend(name for name, _ in pairs))
runner = SimpleNamespace(model_runner=SimpleNamespace(model=engine))
llm = SimpleNamespace(
    llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner)), reset_prefix_cache=lambda: None
)
generation = object.__new__(VLLMGeneration)
generation.model, generation.accelerator, generation.llm = accelerator.prepare(plain), accelerator, llm
generation.mode, generation.enable_sleep_mode, generation._dist = "colocate", False, DistributedBackend(accelerator)
generation.model(torch.ones(1, 8, device=accelerator.device)).sum().backward()
generation.sync_weights()

wrong = sorted(received) != sorted(names)
word = "wrong" if wrong else "right"
print(f"{word}: rank {accelerator.process_index}: vLLM was given {received}, the model has {names}")
accelerator.end_training()
raise SystemExit(wrong)
