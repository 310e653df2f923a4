"""The reference joins the optimizer's state whatever a load or another optimizer made of it on each rank."""

from __future__ import annotations

import types

import torch
from support.ranks import Setting, control, on_ranks, this_device, this_rank, world_size
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdp_doctor.case import reference
from fsdp_doctor.case.reference import Reference

_TWO = Setting("emulated", 2)


def _take(model: nn.Module, optimizer: torch.optim.Optimizer) -> Reference:
    runtime = types.SimpleNamespace(
        rank=this_rank(), world_size=world_size(), control=control(), synchronize=torch.emulated.synchronize
    )
    return reference.take(model, optimizer, runtime)  # type: ignore[arg-type]


def _net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).to(this_device(), dtype)


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 6, device=this_device(), dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()


@on_ranks(_TWO)
def test_the_order_of_a_parameters_state_may_differ_between_ranks() -> None:
    model = fully_shard(_net())
    optimizer = torch.optim.AdamW(model.parameters())
    _trained(model, optimizer)
    expected = _take(model, optimizer).optimizer
    if this_rank() == 1:
        # As loads leave it.
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = dict(reversed(state.items()))
    found = _take(model, optimizer).optimizer
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@on_ranks(_TWO)
def test_a_rank_without_a_shard_does_not_need_the_states_dtype() -> None:
    model = FullyShardedDataParallel(_net(torch.bfloat16), use_orig_params=True, device_id=this_device())
    optimizer = torch.optim.AdamW(model.parameters())
    _trained(model, optimizer)
    found = _take(model, optimizer).optimizer
    assert found["0.weight.exp_avg"].dtype == found["1.bias.exp_avg"].dtype == torch.bfloat16
    assert found["0.weight.exp_avg"].shape == (6, 6)
    assert bool(found["1.bias.exp_avg"].isfinite().all())


@on_ranks(_TWO)
def test_an_optimizer_without_the_flat_parameters_has_no_state_and_no_error() -> None:
    plain = _net()
    optimizer = torch.optim.AdamW(plain.parameters())
    model = FullyShardedDataParallel(plain, use_orig_params=False, device_id=this_device())
    _trained(model, optimizer)
    assert _take(model, optimizer).optimizer == {}
