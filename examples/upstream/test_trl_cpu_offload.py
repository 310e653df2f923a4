"""TRL: under each version of FSDP, sync_weights gives vLLM the model's names and values, with and without offload."""

from types import SimpleNamespace as Part

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("version", "original"), [(2, None), (1, True), (1, False)])
@pytest.mark.parametrize("offload", [False, True])
def test_sync_weights(this_rank, version, original, offload):
    AcceleratorState._reset_state(True)  # the first plugin of a process would stay
    options = {"cpu_offload": offload, "auto_wrap_policy": ModuleWrapPolicy({torch.nn.Linear})}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, use_orig_params=original, **options)
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))
    expected, given = {name: value.detach().clone() for name, value in plain.named_parameters()}, {}
    engine = Part(model=Part(load_weights=lambda pairs: given.update((name, value.cpu()) for name, value in pairs)))
    generation = VLLMGeneration.__new__(VLLMGeneration)  # starts no vLLM: what stands for it keeps what it is given
    engine = Part(model_executor=Part(driver_worker=Part(model_runner=engine)))
    generation.llm = Part(llm_engine=engine, reset_prefix_cache=list)
    optimizer = torch.optim.SGD(plain.parameters())
    generation.model, generation.accelerator = accelerator.prepare(plain, optimizer)[0], accelerator
    generation.mode, generation.enable_sleep_mode, generation._dist = "colocate", False, DistributedBackend(accelerator)
    generation.model(torch.ones(1, 6, device=accelerator.device)).sum().backward()
    generation.sync_weights()
    torch.testing.assert_close(given, expected, rtol=0, atol=0)
