"""Remedies of ``examine`` for models that lie in the wrong place, carried out to two right steps."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from support.broken_steps import Job, assert_same_steps
from support.ranks import Setting, on_ranks, this_device
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from fsdp_doctor import examine
from fsdp_doctor.examination import Examination

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
