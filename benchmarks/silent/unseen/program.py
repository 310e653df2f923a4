"""The base class of the unseen programs, which run on two ranks, and functions that several of them use."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ..program import Program

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


class Unseen(Program):
    """A program with an error, or without it if ``mended`` is set. Its files are judged.

    left, right: directories or files in the program's directory; ``right`` has the values that ``left`` must have.
    """

    command = "checkpoint verify"
    mended = False
    left = ""
    right = ""
    as_base = False

    def commands(self) -> list[list[str]]:
        option = "--base" if self.as_base else "--against"
        against = [option, str(self.directory / self.right)] if self.right else []
        return [["checkpoint", "verify", str(self.directory / self.left), *against]]

    def path(self, *parts: str) -> str:
        return os.path.join(self.directory, *parts)

    def train(self, model: Any, after_step: Callable[[], None] = lambda: None) -> None:
        opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        torch.manual_seed(100 + self.rank)
        for _ in range(3):
            ids = torch.randint(0, 128, (2, 16))
            model(input_ids=ids, labels=ids).loss.backward()
            opt.step()
            opt.zero_grad()
            after_step()


def full(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def shard(model: Any, layers: Any, **options: Any) -> Any:
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def save_adapter(model: Any, directory: str, rank: int) -> None:
    sd = {k.replace(".default", ""): full(v) for k, v in model.state_dict().items() if "lora_" in k}
    if rank == 0:
        os.makedirs(directory, exist_ok=True)
        model.peft_config["default"].save_pretrained(directory)
        save_file({k: v.contiguous() for k, v in sd.items()}, os.path.join(directory, "adapter_model.safetensors"))
    dist.barrier()
