"""Models for ``examine``, on two ranks of the emulated device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, ShardingStrategy, fully_shard

from fsdp_doctor import Examination, examine
from fsdp_doctor.examination.examine import Finding, TensorFacts
from support.ranks import Setting, on_ranks, this_device

on_two_ranks = on_ranks(Setting("emulated", 2))
EVEN, UNEVEN = 6, 7


class Net(nn.Module):
    """A model with a tied pair in one unit, a buffer that is in the state dict, and a buffer that is not."""

    def __init__(self, hidden: int = EVEN) -> None:
        super().__init__()
        self.up = nn.Linear(4, hidden)
        self.down = nn.Linear(hidden, 4)
        self.embed = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("scratch", torch.ones(4), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(self.down(self.up(hidden)) * self.scale) * self.scratch)


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("emulated", (2,), mesh_dim_names=("fsdp",))


def fsdp2_model(hidden: int = EVEN, *, over: DeviceMesh | None = None, **options: Any) -> nn.Module:
    net = Net(hidden)
    if "offload_policy" not in options:
        net = net.to(this_device())
    over = over or mesh()
    for layer in (net.up, net.down):
        fully_shard(layer, mesh=over, **options)
    return fully_shard(net, mesh=over, **options)


def fsdp1_model(**options: Any) -> nn.Module:
    net = Net()
    net.up = FullyShardedDataParallel(net.up, device_id=this_device(), **options)
    return FullyShardedDataParallel(net, device_id=this_device(), **options)


PINNED, UNPINNED = CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)
HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "fsdp2": fsdp2_model,
    "fsdp2 uneven": lambda: fsdp2_model(UNEVEN),
    "fsdp2 policy": lambda: fsdp2_model(offload_policy=PINNED),
    "fsdp2 policy uneven": lambda: fsdp2_model(UNEVEN, offload_policy=PINNED),
    "fsdp2 policy unpinned": lambda: fsdp2_model(offload_policy=UNPINNED),
    "hsdp": lambda: fsdp2_model(over=init_device_mesh("emulated", (1, 2), mesh_dim_names=("replicate", "shard"))),
    "size1": lambda: fsdp2_model(over=init_device_mesh("emulated", (2, 1), mesh_dim_names=("replicate", "shard"))),
    "fsdp1": lambda: fsdp1_model(use_orig_params=False),
    "fsdp1-orig": lambda: fsdp1_model(use_orig_params=True),
    "fsdp1 no shard": lambda: fsdp1_model(sharding_strategy=ShardingStrategy.NO_SHARD),
    "fsdp1 no shard policy": lambda: fsdp1_model(
        sharding_strategy=ShardingStrategy.NO_SHARD, cpu_offload=CPUOffload(True)
    ),
    "fsdp1 policy": lambda: fsdp1_model(use_orig_params=False, cpu_offload=CPUOffload(True)),
    "fsdp1-orig policy": lambda: fsdp1_model(use_orig_params=True, cpu_offload=CPUOffload(True)),
}


def train(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    forward(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def forward(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 4, device=this_device())).sum()


def trained(model: nn.Module) -> nn.Module:
    train(model)
    return model


def kinds(examination: Examination, severity: str = "") -> list[str]:
    return [finding.kind for finding in examination.findings if severity in ("", finding.severity)]


def finding(model: nn.Module, kind: str, optimizer: torch.optim.Optimizer | None = None) -> Finding:
    examination = examine(model, optimizer)
    findings = [finding for finding in examination.findings if finding.kind == kind]
    assert len(findings) == 1, f"{kind} is not among {kinds(examination)} once"
    return findings[0]


def row(model: nn.Module, name: str) -> TensorFacts:
    examination = examine(model)
    (facts,) = [row for row in examination.parameters + examination.buffers if row.name == name]
    return facts


def equal(actual: object, expected: object) -> None:
    assert actual == expected, f"{actual!r} is not {expected!r}"
