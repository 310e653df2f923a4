"""Optimizers whose state is 8-bit codes with scales: a full state of a value per element is refused by name."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from support.ranks import Setting, on_ranks, this_device
from support.saving import new_directory
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_doctor import LoadError, SaveError, load_optimizer_state, save_optimizer_state

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@on_ranks(Setting("emulated", 2))
def test_8_bit_state_is_refused_by_save_and_load_before_anything_changes() -> None:
    torchao: Any = importlib.import_module("torchao.optim")
    model: Any = fully_shard(nn.Sequential(nn.Linear(128, 128, bias=False)).to(this_device()))
    optimizer = torchao.AdamW8bit(model.parameters(), lr=0.01)
    full = {"state": {"0.weight": {"exp_avg": torch.ones(128, 128)}}, "param_groups": [{"params": ["0.weight"]}]}
    with pytest.raises(LoadError, match="has no exp_avg yet, and it is unknown whether"):
        load_optimizer_state(model, optimizer, full)
    assert not optimizer.state
    model(torch.ones(2, 128, device=this_device())).sum().backward()
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    codes = {key: value.to_local().codes.clone() for key, value in _moments(optimizer)}
    with pytest.raises(LoadError, match="not a tensor with a value per element"):
        load_optimizer_state(model, optimizer, full)
    with new_directory() as directory, pytest.raises(SaveError, match="not a tensor with a value per element"):
        save_optimizer_state(model, optimizer, directory)
    assert all(torch.equal(value.to_local().codes, codes[key]) for key, value in _moments(optimizer))


def _moments(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    return [(key, value) for state in optimizer.state.values() for key, value in state.items() if value.ndim]
