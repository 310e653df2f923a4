"""``examine`` on two ranks: what it reads of models that are as they should be, and how it shows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.examined import (
    HEALTHY,
    PINNED,
    UNEVEN,
    UNPINNED,
    Net,
    equal,
    forward,
    fsdp1_model,
    fsdp2_model,
    kinds,
    mesh,
    on_two_ranks,
    row,
    train,
    trained,
)
from support.ranks import this_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor import ModelIsBad, examine
from fsdp_doctor.weights.fsdp import private


@on_two_ranks
def test_nothing_is_found_in_a_healthy_model_at_any_stage_of_training() -> None:
    for name, build in HEALTHY.items():
        model = build()
        equal((name, "fresh", kinds(examine(model))), (name, "fresh", []))
        optimizer = train(model)
        equal((name, "trained", kinds(examine(model, optimizer, raise_on_bad=True))), (name, "trained", []))
        loss = forward(model)
        equal((name, "after forward", kinds(examine(model, optimizer))), (name, "after forward", []))
        loss.backward()


@on_two_ranks
def test_the_facts_are_those_of_the_sharded_parameters() -> None:
    model = trained(fsdp2_model(UNEVEN))
    for shown in ("sharded", "unsharded"):
        up = row(model, "up.weight")
        shard = 4 if dist.get_rank() == 0 else 3
        equal((shown, tuple(up.shape), tuple(up.local_shape)), (shown, (7, 4), (shard, 4)))
        state = up.state
        equal((state.kind, state.wrapper_device, state.device), ("fsdp2", this_device(), this_device()))
        equal(
            (state.pinned, state.dtype, str(state.placements), state.even),
            (None, torch.float32, "(Shard(dim=0),)", False),
        )
        assert state.mesh is not None
        assert state.unit is not None
        equal((state.mesh.names, state.mesh.shape, state.mesh.carries_cpu), (("fsdp",), (2,), True))
        equal((state.unit.compute_device, state.unit.policy, state.unit.initialized), (this_device(), False, True))
        equal(row(model, "head.weight").tied_to, "embed.weight")
        equal(row(model, "embed.weight").tied_to, "")
        forward(model)  # The root shows its parameters unsharded from here on.


@on_two_ranks
def test_a_policy_shows_in_the_facts() -> None:
    model = fsdp2_model(offload_policy=PINNED)
    state = row(model, "up.weight").state
    assert state.unit is not None
    equal((state.device.type, state.pinned, state.policy, state.unit.pins), ("cpu", True, True, True))
    equal(state.unit.initialized, False)
    equal(row(fsdp2_model(offload_policy=UNPINNED), "up.weight").state.pinned, False)


@on_two_ranks
def test_an_fsdp1_unit_is_one_row_with_the_names_that_it_holds() -> None:
    for use_orig_params in (False, True):
        found = examine(trained(fsdp1_model(use_orig_params=use_orig_params)))
        rows = {row.name: (row.holds, tuple(row.shape), row.tied_to) for row in found.parameters}
        expected = {
            "flat_param": (("down.weight", "down.bias", "embed.weight"), (44,), ""),
            "head.weight": ((), (44,), "embed.weight"),
            "up.flat_param": (("up.weight", "up.bias"), (30,), ""),
        }
        equal(rows, expected)
        equal({row.name for row in found.buffers}, {"scale", "scratch"})


@on_two_ranks
def test_a_tensor_parallel_model_under_fully_shard_is_read() -> None:
    two = init_device_mesh("emulated", (1, 2), mesh_dim_names=("fsdp", "tp"))
    net = parallelize_module(Net(UNEVEN).to(this_device()), two["tp"], {"up": ColwiseParallel()})
    model = fully_shard(net, mesh=two["fsdp"])
    state = row(model, "up.weight").state
    assert state.mesh is not None
    equal((state.mesh.names, state.mesh.shape, state.even), (("fsdp", "tp"), (1, 2), False))
    equal(kinds(examine(model)), [])


@on_two_ranks
def test_ignored_parameters_and_the_meta_device_are_read() -> None:
    with torch.device("meta"):
        model = Net()
    fully_shard(model, mesh=mesh(), ignored_params={model.up.weight})
    found = examine(model)
    equal(kinds(found), ["meta", "gradients-unmanaged"])
    equal(row(model, "up.weight").state.kind, "plain")
    equal(row(model, "down.weight").state.kind, "fsdp2")


@on_two_ranks
def test_a_model_that_is_not_fsdp_is_said_to_be_none() -> None:
    for model in (Net(), Net().to(this_device()), DistributedDataParallel(Net())):
        found = examine(model, train_plain(model))
        equal((kinds(found, "note"), found.bad), (["not-fsdp"], ()))
        equal([row.name for row in found.parameters][:2], ["up.weight", "up.bias"])
        assert type(model).__name__ in str(found)


def train_plain(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4, device=next(model.parameters()).device)).sum().backward()
    optimizer.step()
    return optimizer


# How it looks


@on_two_ranks
def test_one_rank_alone_may_call_it_and_a_guard_raises() -> None:
    model = trained(fsdp2_model(offload_policy=PINNED))
    optimizer = train(model)
    model.to(this_device())
    if dist.get_rank() == 1:
        with pytest.raises(ModelIsBad, match=r"^half-moved: .* reporting emulated:1") as raised:
            examine(model, optimizer, raise_on_bad=True)
        equal(kinds(raised.value.examination, "bad"), ["half-moved"])


@on_two_ranks
def test_nothing_is_changed() -> None:
    states = [build() for build in HEALTHY.values()] + [trained(build()) for build in HEALTHY.values()]
    states.append(trained(fsdp2_model(offload_policy=PINNED)).to(this_device()))
    for model in states:
        before = identity(model)
        allocated = torch.emulated.memory_allocated()
        with torch.inference_mode():
            examine(model)
        str(examine(model))
        equal((identity(model), torch.emulated.memory_allocated()), (before, allocated))


def identity(model: nn.Module) -> list[tuple[Any, ...]]:
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = [(name, shown, private.read_local_tensor(shown)) for name, shown in own]
    return [
        (
            name,
            id(shown),
            shown.device,
            shown._version,
            shown.requires_grad,
            local.device,
            local.data_ptr(),
            local._version,
        )
        for name, shown, local in tensors
    ]


@on_two_ranks
def test_it_prints_a_short_table_with_the_findings() -> None:
    model = trained(fsdp2_model(offload_policy=PINNED)).to(this_device())
    text = str(examine(model))
    for words in (
        "bad, half-moved:",
        "[fsdp2-pinned-policy-half-moved]",
        "fsdp2 on emulated:",
        "5 parameters and 1 tied",
    ):
        assert words in text, text
    assert len(text.splitlines()) < 15, text
