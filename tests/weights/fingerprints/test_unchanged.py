"""``unchanged``: a context that moves weights raises if they are others afterwards, and says which."""

from __future__ import annotations

import pytest
import torch
from support.hidden_gpus import hide_gpus
from support.ranks import Setting, on_ranks, this_device, this_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdp_doctor import WeightsChanged, unchanged

on_two_devices = on_ranks(Setting("emulated", 2))


def _sharded(head: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2, trained for a step. head: its rows, of which three make uneven shards."""
    torch.manual_seed(0)
    device = this_device()
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, head, bias=False)).to(device)
    mesh = init_device_mesh(device.type, (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _offload(model: nn.Module, *, non_blocking: bool) -> None:
    model.to("cpu", non_blocking=non_blocking)
    torch.accelerator.synchronize()
    model.to(this_device())


def test_weights_on_the_cpu_are_compared_where_gpus_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_gpus(monkeypatch)
    model = nn.Linear(4, 4)
    with pytest.raises(WeightsChanged, match="bias"), unchanged(model):
        model.bias.data.add_(1)


@on_two_devices
def test_an_offload_that_waits_changes_nothing() -> None:
    model, optimizer = _sharded(3)
    with unchanged(model, optimizer):
        _offload(model, non_blocking=False)


@on_two_devices
def test_even_shards_survive_an_offload_that_does_not_wait() -> None:
    model, optimizer = _sharded(4)
    with unchanged(model, optimizer):
        _offload(model, non_blocking=True)


@on_two_devices
def test_an_uneven_shard_lost_by_offloading_is_named_with_rank_and_call() -> None:
    """The race is not healed: docs/findings.md has it as the first finding in torch."""
    model, _ = _sharded(3)
    if this_rank() == 0:
        with unchanged(model):
            _offload(model, non_blocking=True)
        return
    with (
        pytest.raises(
            WeightsChanged, match=r"rank 1: 1 of 2 .*1\.weight.*_offload\(model, non_blocking=True\)"
        ) as raised,
        unchanged(model),
    ):
        _offload(model, non_blocking=True)
    assert (raised.value.names, raised.value.rank) == (["1.weight"], 1)


@on_two_devices
def test_fsdp1_may_be_moved_and_not_changed() -> None:
    model = FullyShardedDataParallel(nn.Linear(64, 3, device=this_device()), use_orig_params=True)
    with unchanged(model):
        _offload(model, non_blocking=False)
    with pytest.raises(WeightsChanged, match="_flat_param"), unchanged(model), torch.no_grad():
        next(model.parameters()).add_(1)


def test_a_changed_state_of_the_optimizer_is_named() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(WeightsChanged) as raised, unchanged(model, optimizer):
        optimizer.state[model.bias]["exp_avg"].zero_()
    assert raised.value.names == ["exp_avg of the optimizer's parameter 1"]


def test_another_dtype_is_a_change_and_exceptions_of_the_body_pass_through() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(WeightsChanged), unchanged(model):
        model.bfloat16()
    with pytest.raises(ZeroDivisionError), unchanged(model.half()):
        model.float().weight[1 // 0]
