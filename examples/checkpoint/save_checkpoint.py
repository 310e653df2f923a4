"""An FSDP2 model with CPU offload trains one step; rank 0 saves it as a Hugging Face checkpoint and reads it back.

torchrun --standalone --nproc-per-node=2 save_checkpoint.py DIRECTORY [--model DIR] [--lora]
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen3Config

import fsdp_doctor

SMALL = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 32}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="where the checkpoint is written")
    parser.add_argument("--model", help="directory of a checkpoint; by default a small Qwen3 with random weights")
    parser.add_argument("--lora", action="store_true", help="train adapters alone; saved are the merged weights")
    options = parser.parse_args()

    device = start()
    if options.model:
        config = AutoConfig.from_pretrained(options.model)
    else:
        config = Qwen3Config(**SMALL, **HEADS, tie_word_embeddings=True)
    model = sharded(config, options.model, options.lora, device)
    train_step(model, config.vocab_size, device)

    state = fsdp_doctor.full_state_dict(model, dtype=torch.bfloat16)  # lora="merged" is the default
    prompt = torch.randint(config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    own = logits(model, prompt.to(device))
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    return save_and_check(options.directory, config, state, prompt, own) if is_first else 0


def start() -> torch.device:
    """This rank's device: the accelerator where there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = accelerator.type if accelerator else "cpu"
    dist.init_process_group(dist.get_default_backend_for_device(kind))
    if kind == "cpu":
        return torch.device("cpu")
    index = dist.get_node_local_rank()
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def sharded(config: PretrainedConfig, directory: str | None, lora: bool, device: torch.device) -> nn.Module:
    """In fp32 on the host, the same on each rank, then sharded: the masters stay there, bf16 is computed with."""
    torch.manual_seed(0)
    model: nn.Module
    if directory:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layers = model.get_submodule("model.layers").children()
    if lora:
        model = with_adapters(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    return model


def with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted: nn.Module = get_peft_model(model, settings)
    return adapted


def train_step(model: nn.Module, vocab_size: int, device: torch.device) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.randint(vocab_size, (2, 64), generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()


@torch.no_grad()
def logits(model: nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    """bf16 as it is computed; fp32, on the host, holds it exactly."""
    found: torch.Tensor = model.eval()(input_ids=prompt, use_cache=False).logits
    return found.float().cpu()


def save_and_check(
    directory: str, config: PretrainedConfig, state: dict[str, torch.Tensor], prompt: torch.Tensor, own: torch.Tensor
) -> int:
    """Rank 0's part, on the host. ``own``: the sharded model's logits."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(state, assign=True)  # the same memory, not a second copy
    # Writes config.json too, and of tied names, which safetensors refuses, the one that is to be in the file.
    model.save_pretrained(directory, state_dict=dict(state))

    saved = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    found = saved.state_dict()
    different = sorted(name for name in state.keys() | found.keys() if not same(state.get(name), found.get(name)))
    if different:
        print(f"not as extracted: {', '.join(different)}")
    read = logits(saved, prompt)
    equal = torch.equal(read, logits(model, prompt))
    print(f"{len(state)} tensors in {directory}: {f'{len(different)} DIFFERENT' if different else 'equal'}")
    print(f"logits of the checkpoint and of the extracted weights: {'equal' if equal else 'DIFFERENT'}")
    print(f"largest difference to the sharded model's own forward: {(read - own).abs().max():.3g}")
    return 1 if different or not equal else 0


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Bit by bit."""
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


if __name__ == "__main__":
    raise SystemExit(main())
