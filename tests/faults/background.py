"""Extractions during which the job trains on: what they yield is to be the weights of their call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

Train: TypeAlias = Callable[[], None]


def _gather(shards: dict[str, Any], device: torch.device) -> Iterator[tuple[str, Any]]:
    for name, shard in shards.items():
        yield name, shard.to(device).full_tensor()


def copies_and_trains(model: nn.Module, device: torch.device, train: Train) -> Iterator[tuple[str, Any]]:
    copies = dict(_gather(model.state_dict(), device))
    train()
    yield from copies.items()


def trains_before_it_copies(model: nn.Module, device: torch.device, train: Train) -> Iterator[tuple[str, Any]]:
    train()
    yield from _gather(model.state_dict(), device)


def keeps_the_shards(model: nn.Module, device: torch.device, train: Train) -> Iterator[tuple[str, Any]]:
    shards = model.state_dict()
    train()
    yield from _gather(shards, device)


def trains_while_it_yields(model: nn.Module, device: torch.device, train: Train) -> Iterator[tuple[str, Any]]:
    for place, entry in enumerate(_gather(model.state_dict(), device)):
        yield entry
        if place == 1:
            train()


def freezes_after_the_step(model: nn.Module, device: torch.device, train: Train) -> Iterator[tuple[str, Any]]:
    """The step that it trains ends as it should, and the next one will not."""
    yield from copies_and_trains(model, device, train)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
