"""Optimizers that keep their state differently from torch's own. Each resembles a published optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor


class Gathering(torch.optim.Optimizer):
    """An optimizer that keeps the whole momentum on each rank, like a Muon that gathers gradients.

    drifts: whether the ranks' momenta differ.
    owners: whether only one rank has the momentum of each parameter.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, drifts: bool = False, owners: bool = False) -> None:
        self._drifts, self._owners = drifts, owners
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            if parameter.grad is None:
                continue
            full = parameter.grad.full_tensor()
            whole = torch.zeros_like(full)
            if not self._owners or index % dist.get_world_size() == dist.get_rank():
                whole = self.state[parameter].setdefault("momentum", whole)
                whole.mul_(0.9).add_(full, alpha=1 + self._drifts * dist.get_rank())
            if self._owners:
                whole = whole.clone()
                dist.broadcast(whole, index % dist.get_world_size())
            update = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.sub_(update, alpha=self.param_groups[0]["lr"])


class Local(torch.optim.Optimizer):
    """An optimizer that computes with local shards as plain tensors, and keeps its momentum as such tensors."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                shard = parameter.grad.to_local()
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(shard))
                momentum.mul_(0.9).add_(shard)
                parameter.to_local().sub_(momentum, alpha=self.param_groups[0]["lr"])


class OfRows(torch.optim.Optimizer):
    """An optimizer that keeps one value for each row, like Adafactor's factors."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                shard = parameter.grad.to_local()
                squares = shard.square()
                rows = squares.mean(-1) if squares.ndim > 1 else squares
                self.state[parameter].setdefault("rows", torch.zeros_like(rows)).mul_(0.9).add_(rows)
                parameter.to_local().sub_(shard, alpha=self.param_groups[0]["lr"])
