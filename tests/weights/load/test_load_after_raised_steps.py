"""Loads after a step that raised, into gathers that are pending, and in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from support.broken_steps import Job, assert_same_steps, make_net, wrap_fsdp1, wrap_fsdp2
from support.extraction import assert_same, extracted, mesh_over, tensors_of
from support.loading import everywhere, on_first, on_four
from support.ranks import Setting, on_ranks, this_device
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, StateDictType

from fsdp_doctor import LoadError, examine, load_full_tensors, load_optimizer_state

on_the_device = on_ranks(Setting("emulated", 2))
Part = Literal["forward", "backward"]
# The first and the last module of a forward, one in a unit, and a unit.
PLACES = ("0", "1", "2.up", "3")


def other_weights() -> dict[str, torch.Tensor]:
    return tensors_of(make_net(seed=5))


def check_loaded(
    wrap: Callable[[nn.Sequential], nn.Module], name: str, part: Part, source: Callable[[Any], Any]
) -> None:
    job, twin = Job(wrap), Job(wrap)
    job.raise_in(name, part)
    for loaded in (job, twin):
        load_full_tensors(loaded.model, source(other_weights()))
    assert_same(extracted(job.model), other_weights())
    assert "step-open" not in [finding.kind for finding in examine(job.model).findings]
    assert_same_steps(job, twin)


@everywhere
def test_steps_after_a_load_into_fsdp2_are_right_wherever_a_step_raised() -> None:
    for name in PLACES:
        check_loaded(wrap_fsdp2, name, "forward", dict)
        check_loaded(wrap_fsdp2, name, "backward", on_first)


@on_the_device
def test_steps_after_a_load_are_right_under_a_policy_after_a_raise() -> None:
    for name in PLACES:
        for part in ("forward", "backward"):
            check_loaded(lambda net: wrap_fsdp2(net, offload_policy=CPUOffloadPolicy()), name, part, dict)


@on_the_device
def test_steps_after_a_load_are_right_where_units_stay_gathered() -> None:
    for part in ("forward", "backward"):
        check_loaded(lambda net: wrap_fsdp2(net, reshard_after_forward=False), "2", part, dict)


@on_the_device
def test_steps_after_a_load_into_fsdp1_are_right_after_a_raised_forward() -> None:
    for offload in (None, CPUOffload(offload_params=True)):
        for original in (False, True):
            for name in PLACES:
                wrap = lambda net: wrap_fsdp1(net, cpu_offload=offload, use_orig_params=original)  # noqa: B023, E731
                check_loaded(wrap, name, "forward", dict)


@on_the_device
def test_torch_reads_fsdp1_whose_root_owns_nothing_after_a_load() -> None:
    def wrap(net: nn.Sequential) -> nn.Module:
        for place in range(4):
            net[place] = FullyShardedDataParallel(net[place], device_id=this_device())
        return FullyShardedDataParallel(net, device_id=this_device())

    job = Job(wrap)
    job.raise_in("2", "forward")
    load_full_tensors(job.model, other_weights())
    with FullyShardedDataParallel.state_dict_type(job.model, StateDictType.FULL_STATE_DICT):
        assert_same(dict(job.model.state_dict()), other_weights())


@on_the_device
def test_a_load_into_fsdp1_after_a_raised_backward_is_refused() -> None:
    for original in (False, True):
        job = Job(lambda net: wrap_fsdp1(net, use_orig_params=original))  # noqa: B023
        before = extracted(job.model)
        job.raise_in("2", "backward")
        with pytest.raises(LoadError):
            load_full_tensors(job.model, other_weights())
        assert_same(extracted(job.model), before)


@on_four
def test_gradients_that_were_not_reduced_are_discarded_under_hsdp() -> None:
    wrap = lambda net: wrap_fsdp2(net, mesh=mesh_over(2, 2))  # noqa: E731
    job, twin = Job(wrap), Job(wrap)
    job.model.set_requires_all_reduce(False)
    job.compute_loss(3).backward()
    job.raise_in("1", "backward")
    job.model.set_requires_all_reduce(True)
    report = load_full_tensors(job.model, other_weights())
    load_full_tensors(twin.model, other_weights())
    assert set(report.discarded) == set(other_weights())
    assert_same_steps(job, twin)


@everywhere
def test_a_report_names_parameters_whose_gradients_were_discarded() -> None:
    job = Job(wrap_fsdp2)
    assert load_full_tensors(job.model, other_weights()).discarded == ()
    job.raise_in("1", "backward")
    # The root's last layer has its gradient; the second unit's was reduced.
    assert load_full_tensors(job.model, other_weights()).discarded == ("3.weight", "3.bias")


@everywhere
def test_gradients_of_an_accumulation_are_kept_between_two_steps() -> None:
    job, twin = Job(wrap_fsdp2), Job(wrap_fsdp2)
    for one in (job, twin):
        one.model.set_requires_gradient_sync(False)
        one.compute_loss(3).backward()
        one.model.set_requires_gradient_sync(True)
    same = {name: tensor.clone() for name, tensor in extracted(job.model).items()}
    assert load_full_tensors(job.model, same).discarded == ()
    assert_same_steps(job, twin)


@everywhere
def test_gathers_that_are_pending_are_not_used_after_a_load() -> None:
    def skip_a_layer(job: Job) -> None:
        first, second = job.find("1"), job.find("2")
        first.set_modules_to_forward_prefetch([second])  # type: ignore[operator]
        first(torch.ones(2, 6, device=this_device()))

    def gather_ahead(job: Job) -> list[Any]:
        return [module.unshard(async_op=True) for module in (job.model, job.find("1"), job.find("2"))]

    for leave in (skip_a_layer, gather_ahead):
        job, twin = Job(wrap_fsdp2), Job(wrap_fsdp2)
        handles = leave(job)
        assert "gather-pending" in [finding.kind for finding in examine(job.model).findings]
        for loaded in (job, twin):
            load_full_tensors(loaded.model, other_weights())
        for handle in handles or ():
            handle.wait()
        assert_same_steps(job, twin)


@everywhere
def test_steps_after_an_optimizer_load_are_right_after_a_raised_backward() -> None:
    job, twin, other = Job(wrap_fsdp2), Job(wrap_fsdp2), Job(lambda net: net.to(this_device()))
    names = list(other.shards)
    packed = other.optimizer.state_dict()
    state = {name: packed["state"][number] for number, name in enumerate(names)}
    groups = [{**options, "params": names} for options in packed["param_groups"]]
    job.raise_in("1", "backward")
    for loaded in (job, twin):
        load_optimizer_state(loaded.model, loaded.optimizer, {"state": state, "param_groups": groups})
    assert_same_steps(job, twin)


@everywhere
def test_a_load_in_the_middle_of_a_step_is_refused() -> None:
    job = Job(wrap_fsdp2)
    before = extracted(job.model)
    refused: list[str] = []

    def load(*_: Any) -> None:
        with pytest.raises(LoadError):
            load_full_tensors(job.model, other_weights())
        refused.append("once")

    hooks = [job.find("2").register_forward_hook(load), job.find("2").register_full_backward_hook(load)]
    job.compute_loss().backward()
    for hook in hooks:
        hook.remove()
    assert len(refused) == 2
    assert_same(extracted(job.model), before)
