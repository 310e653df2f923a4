"""``examine`` on two ranks: what it says of the gradients of the next backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.examined import Net, equal, finding, fsdp1_model, fsdp2_model, kinds, mesh, on_two_ranks, trained
from support.ranks import this_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_doctor import examine


def replicated(*, ranks: int) -> Any:
    dims = (ranks, 2 // ranks)
    return fsdp2_model(over=init_device_mesh("emulated", dims, mesh_dim_names=("replicate", "shard")))


@on_two_ranks
def test_gradients_that_stay_on_their_rank_are_named_until_they_are_synchronized_again() -> None:
    for model in (fsdp2_model(), trained(fsdp2_model())):
        model.up.set_requires_gradient_sync(False)
        found = finding(model, "gradients-unsynchronized")
        equal((found.severity, found.names), ("hazard", ("up.weight", "up.bias")))
        model.up.set_requires_gradient_sync(True)
        equal(kinds(examine(model)), [])
    model = trained(fsdp1_model())
    with model.no_sync():
        equal(finding(model, "gradients-unsynchronized").names, ("flat_param", "up.flat_param"))
    equal(kinds(examine(model)), [])


@on_two_ranks
def test_an_all_reduce_that_is_off_is_named_where_there_are_replicas() -> None:
    model = replicated(ranks=2)
    model.set_requires_all_reduce(False)
    equal(len(finding(model, "gradients-unreplicated").names), 5)
    model = fsdp2_model()
    model.set_requires_all_reduce(False)
    equal(kinds(examine(model)), [])


@on_two_ranks
def test_a_backward_that_does_not_wait_is_named() -> None:
    model = trained(fsdp2_model())
    model.set_is_last_backward(False)
    equal(finding(model, "backward-open-ended").severity, "hazard")
    model.set_is_last_backward(True)
    equal(kinds(examine(model)), [])


@on_two_ranks
def test_another_divisor_than_the_number_of_ranks_is_a_note() -> None:
    model = fsdp2_model()
    model.down.set_gradient_divide_factor(1.0)
    found = finding(model, "gradients-divided")
    equal((found.severity, found.names), ("note", ("down.weight", "down.bias")))
    assert "divided by 1," in found.sentence
    model.down.set_gradient_divide_factor(2.0)
    equal(kinds(examine(model)), [])


@on_two_ranks
def test_experts_on_a_part_of_the_ranks_may_be_divided_by_the_number_of_all() -> None:
    """Under expert parallelism each of them has had tokens of all ranks."""
    net = Net().to(this_device())
    fully_shard(net.down, mesh=init_device_mesh("emulated", (1, 2), mesh_dim_names=("efsdp", "ep"))["efsdp"])
    model = fully_shard(net, mesh=mesh())
    model.down.set_gradient_divide_factor(2.0)
    equal(kinds(examine(model)), [])
    model.down.set_gradient_divide_factor(4.0)
    equal(finding(model, "gradients-divided").names, ("down.weight", "down.bias"))


@on_two_ranks
def test_what_trains_beside_the_shards_is_named_and_what_is_frozen_is_not() -> None:
    net = Net().to(this_device())
    fully_shard(net.up, mesh=mesh())
    found = finding(net, "gradients-unmanaged")
    equal((found.severity, found.names), ("hazard", ("down.weight", "down.bias", "embed.weight")))
    for module in (net.down, net.embed):
        module.requires_grad_(False)
    equal(kinds(examine(net)), [])
    model = fsdp2_model()
    model.prompt = nn.Parameter(torch.zeros(4, device=this_device()))
    equal(finding(model, "gradients-unmanaged").names, ("prompt",))


@on_two_ranks
def test_what_trains_beside_shards_of_one_rank_is_no_matter() -> None:
    net = Net().to(this_device())
    fully_shard(net.up, mesh=init_device_mesh("emulated", (2, 1), mesh_dim_names=("other", "one"))["one"])
    equal(kinds(examine(net)), [])


def _of_two_dtypes(prepare: Callable[[nn.Module], object]) -> nn.Module:
    net = Net().to(this_device())
    net.up.to(torch.bfloat16)
    prepare(net)
    return fully_shard(net, mesh=mesh())


@on_two_ranks
def test_a_unit_of_two_dtypes_is_bad_where_both_train_and_its_first_forward_fails() -> None:
    model = _of_two_dtypes(lambda net: None)
    found = finding(model, "mixed-dtypes")
    equal((found.severity, found.entry, len(found.names)), ("bad", "fsdp2-unit-of-several-dtypes", 5))
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        model(torch.ones(2, 4, device=this_device()))
    equal(kinds(examine(_of_two_dtypes(lambda net: net.up.requires_grad_(False)))), [])
    equal(kinds(examine(_of_two_dtypes(lambda net: fully_shard(net.up, mesh=mesh())))), [])
