"""The base classes of the benchmark's programs, which run on two ranks and collect findings."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .models import Net

Weights = Iterable[tuple[str, torch.Tensor]]


def make_whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


class Program:
    """A program on two ranks, with a directory of its own."""

    command = ""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory, self.rank = directory, dist.get_rank()
        self.findings: list[str] = []

    def report(self, findings: Iterable[object]) -> None:
        self.findings += map(str, findings)

    def commands(self) -> list[list[str]]:
        """Lists the arguments of the fsdp-doctor commands to run when the program has ended."""
        return []

    def run(self) -> None:
        raise NotImplementedError


class Training(Program):
    """A program that trains a sharded model."""

    width, inner, vocabulary = 16, 24, 33
    experts = 0
    tied = False
    dtype = torch.float32
    lora = False
    precision: torch.dtype | None = None
    reshard = True

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__(directory)
        self.model = self.make_model(0)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.05)

    def make_net(self, seed: int) -> Any:
        torch.manual_seed(seed)
        return Net(self.width, self.inner, self.vocabulary, self.experts, self.tied).to(self.dtype)

    def make_model(self, seed: int) -> Any:
        net = self.make_net(seed)
        model: Any = self.add_adapters(net) if self.lora else net
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=self.precision)
        for layer in net.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard)
        return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard)

    def add_adapters(self, net: Any) -> Any:
        return peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["up_proj", "down_proj"]))

    def train(self) -> None:
        tokens = torch.arange(8).add(self.rank) % 33
        self.model(tokens).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
