"""Optimizers that keep their state in other ways than torch's own, each as one that is published does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor


class Gathering(torch.optim.Optimizer):
    """Optimizer that keeps the whole momentum on each rank, as a Muon does that gathers gradients.

    drifts: the ranks' momenta are not the same. owners: one rank alone has that of each parameter.
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
    """Optimizer that computes with plain shards, and keeps its momentum as those."""

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
    """Optimizer that keeps a value for each row, as Adafactor's factors are."""

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
