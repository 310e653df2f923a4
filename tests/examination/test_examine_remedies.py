"""Remedies of ``examine``, carried out on the state that they are for to two right steps."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from support.broken_steps import Job, assert_same_steps, make_net, wrap_fsdp1, wrap_fsdp2
from support.ranks import Setting, on_ranks, this_device
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    OffloadPolicy,
    fully_shard,
)

import fsdp_doctor
from fsdp_doctor import examine
from fsdp_doctor.examination.examine import Examination

on_the_device = on_ranks(Setting("emulated", 2))


def wrap(net: nn.Sequential, policies: dict[str, OffloadPolicy]) -> Any:
    """The units of the net, the root last, each under its own policy; with a buffer that no policy moves."""
    net.register_buffer("scale", torch.ones(3))
    net.to(this_device())
    for name, policy in policies.items():
        module = fully_shard(net.get_submodule(name), offload_policy=policy)
        vars(module)["offload_policy"] = policy
    return net


def bring_home(model: nn.Module) -> None:
    """Carries out what the remedy says of a model of which only some units are under a policy."""
    model.to("cpu")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            is_under_policy = isinstance(vars(module)["offload_policy"], CPUOffloadPolicy)
            module.to("cpu" if is_under_policy else this_device())  # type: ignore[attr-defined]
    move_buffers(model)


def move_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        buffer.data = buffer.data.to(this_device())


def list_serious(examination: Examination) -> set[str]:
    return {finding.kind for finding in examination.findings if finding.severity != "note"}


@on_the_device
def test_the_remedy_for_a_moved_model_leads_to_right_steps() -> None:
    for pins in (True, False):
        under, free = CPUOffloadPolicy(pin_memory=pins), OffloadPolicy()
        for first, second, root in itertools.product((under, free), repeat=3):
            mixes = len({isinstance(policy, CPUOffloadPolicy) for policy in (first, second, root)}) > 1
            if (first, second, root) == (free, free, free):
                continue
            policies = {"1": first, "2": second, "": root}
            for device in (this_device(), "cpu"):
                job, twin = (Job(lambda net: wrap(net, policies)) for _ in range(2))  # noqa: B023
                job.model.to(device)
                found = [finding for finding in examine(job.model).findings if "to(" in finding.remedy]
                assert found
                assert mixes == any("for each FSDP module" in finding.remedy for finding in found)
                if mixes:
                    bring_home(job.model)
                else:
                    job.model.to("cpu")
                    move_buffers(job.model)
                assert list_serious(examine(job.model, job.optimizer)) == set()
                assert_same_steps(job, twin)


def wrap_partly(net: nn.Sequential, *, root: bool) -> nn.Module:
    """FSDP1 around the net's layers, the first of them under CPUOffload, and around the whole."""
    for name in ("1", "2"):
        offload = CPUOffload(offload_params=name == "1")
        net[int(name)] = FullyShardedDataParallel(net[int(name)], device_id=this_device(), cpu_offload=offload)
    return FullyShardedDataParallel(net, device_id=this_device(), cpu_offload=CPUOffload(offload_params=root))


class WaitingJob(Job):
    def finish_backward(self) -> None:
        torch.accelerator.synchronize()


@on_the_device
def test_waiting_for_the_device_gives_a_partly_offloaded_fsdp1_its_gradients() -> None:
    below_a_root, below_an_offloaded_root = (functools.partial(wrap_partly, root=root) for root in (False, True))
    hasty = Job(below_a_root)
    waiting = WaitingJob(below_a_root)
    twin = Job(below_an_offloaded_root)
    assert has(hasty, "gradients-unfinished")
    assert not has(twin, "gradients-unfinished")
    assert_same_steps(waiting, twin)
    with pytest.raises(AssertionError):
        assert_same_steps(hasty, Job(below_an_offloaded_root))


def has(job: Job, kind: str) -> bool:
    return kind in {finding.kind for finding in examine(job.model, job.optimizer).findings}


def move_state(job: Job, device: torch.device) -> None:
    """Moves the state as a framework does that offloads the optimizer and brings it back."""
    for state in job.optimizer.state.values():
        state |= {key: value.to(device) for key, value in state.items() if value.ndim}


@on_the_device
def test_the_remedy_for_optimizer_state_elsewhere_leads_to_right_steps() -> None:
    for build in (wrap_fsdp2, wrap_fsdp1):
        job, twin = Job(build), Job(build)
        move_state(job, torch.device("cpu"))
        assert has(job, "optimizer-elsewhere")
        move_state(job, this_device())
        assert not has(job, "optimizer-elsewhere")
        assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_step_counters_on_the_device_leads_to_right_steps() -> None:
    for build in (wrap_fsdp2, wrap_fsdp1):
        job, twin = Job(build), Job(build)
        assert not has(job, "counters-on-device")
        for state in job.optimizer.state.values():
            state |= {key: value.to(this_device()) for key, value in state.items()}
        assert has(job, "counters-on-device")
        for state in job.optimizer.state.values():
            state["step"] = state["step"].cpu()
        assert not has(job, "counters-on-device")
        assert_same_steps(job, twin)


@on_the_device
def test_counters_of_a_fused_or_capturable_adamw_belong_on_the_device() -> None:
    for options in ({"fused": True}, {"capturable": True}):
        job = Job(wrap_fsdp2, steps=0)
        job.optimizer = torch.optim.AdamW(job.shards.values(), **options)  # type: ignore[arg-type]
        job.step()
        assert next(iter(job.optimizer.state.values()))["step"].device.type == this_device().type
        assert not has(job, "counters-on-device")


@on_the_device
def test_the_remedy_for_state_that_cannot_be_made_leads_to_right_steps() -> None:
    wrap_policy = functools.partial(wrap_fsdp2, offload_policy=CPUOffloadPolicy())
    job, twin = (Job(lambda net: wrap_policy(net).cpu(), steps=0) for _ in range(2))
    job.model.to(this_device())
    assert has(job, "state-cannot-be-made")
    with pytest.raises(RuntimeError, match="Attempted to set the storage"):
        [torch.zeros_like(shard.data) for shard in job.shards.values()]
    job.model.to("cpu")
    move_buffers(job.model)
    for each in (job, twin):
        each.optimizer = torch.optim.Adagrad(each.shards.values())
    assert not has(job, "state-cannot-be-made")
    assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_a_moved_fsdp1_module_leads_to_right_steps() -> None:
    for use_orig_params in (False, True):
        wrap = functools.partial(wrap_fsdp1, use_orig_params=use_orig_params)
        job, twin = Job(wrap), Job(wrap)
        job.model.to("cpu")
        assert has(job, "half-moved")
        job.model.to(this_device())
        assert has(job, "gradients-back") == use_orig_params
        job.optimizer.zero_grad()
        assert not has(job, "gradients-back")
        assert not examine(job.model, job.optimizer).bad
        assert_same_steps(job, twin)


@on_the_device
def test_the_remedies_for_gradient_switches_lead_to_right_steps() -> None:
    switches = {
        "gradients-unsynchronized": "set_requires_gradient_sync",
        "backward-open-ended": "set_is_last_backward",
    }
    for kind, switch in switches.items():
        job, twin = Job(wrap_fsdp2), Job(wrap_fsdp2)
        for one in (job, twin):
            getattr(one.model, switch)(False)
            one.compute_loss(3).backward()
        assert has(job, kind)
        for one in (job, twin):
            getattr(one.model, switch)(True)
        assert not has(job, kind)
        # The accumulation goes on, and is reduced as the same one that nobody looked at.
        assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_what_a_forward_leaves_unsharded_leads_to_right_steps() -> None:
    keep = functools.partial(wrap_fsdp2, reshard_after_forward=False)
    job, twin = Job(keep), Job(keep)
    with torch.no_grad():
        job.compute_loss()
    assert has(job, "unsharded-copy")
    for module in job.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert not has(job, "unsharded-copy")
    assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_a_model_on_meta_leads_to_right_steps() -> None:
    twin = Job(wrap_fsdp2)
    weights = {name: tensor.clone() for name, tensor in fsdp_doctor.full_tensors(twin.model)}
    with torch.device("meta"):
        net = make_net()
    for name in ("1", "2"):
        fully_shard(net.get_submodule(name))
    model = fully_shard(net)
    assert "meta" in {finding.kind for finding in examine(model).bad}
    model.to_empty(device=this_device())
    fsdp_doctor.load_full_tensors(model, weights)
    assert not examine(model).bad
    job = Job.__new__(Job)
    job.net, job.model, job.shards = net, model, dict(model.named_parameters())
    job.optimizer = torch.optim.AdamW(job.shards.values(), lr=0.05)
    twin.optimizer = torch.optim.AdamW(twin.shards.values(), lr=0.05)
    assert_same_steps(job, twin)
