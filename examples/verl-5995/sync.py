"""verl's own engine as in the issue: FSDP2, offload_policy=true, a training step, and the sync to the rollout.

    torchrun --nproc-per-node 2 sync.py

With verl 0.7.1 it ends with the exception of the issue; under `fsdp-doctor fix` it prints what was sent.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils.device import get_device_name, get_nccl_backend
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}")
device = torch.accelerator.current_accelerator()

with tempfile.TemporaryDirectory() as directory:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 2}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    Qwen3ForCausalLM(config).save_pretrained(directory, is_main_process=True)
    options = {"load_tokenizer": False, "use_remove_padding": False, "enable_gradient_checkpointing": False}
    engine = FSDPEngineWithLMHead(
        HFModelConfig(path=directory, override_config={"attn_implementation": "sdpa"}, **options),
        FSDPEngineConfig(strategy="fsdp2", offload_policy=True, use_torch_compile=False),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=100),
        CheckpointConfig(),
    )
    engine.initialize()


def train(number):
    batch = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(number)).to(device)
    with engine.train_mode(), torch.autocast(device_type=get_device_name(), dtype=torch.bfloat16):
        engine.module(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        engine.optimizer_step()


train(0)
expected = {
    name: parameter.detach().to(device).full_tensor().to(torch.bfloat16)
    for name, parameter in engine.module.named_parameters()
}
tensors, _ = engine.get_per_tensor_param()
sent = {name: tensor.clone() for name, tensor in tensors}
wrong = [name for name, tensor in expected.items() if not torch.equal(sent[name].to(torch.bfloat16), tensor)]
assert not wrong, wrong
train(1)
print(f"rank {dist.get_rank()} sent {len(sent)} tensors, and trained on")
dist.destroy_process_group()
