"""Remedies of ``examine`` for what offloads, moves and FSDP1's own memory leave, carried out to two right steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.broken_steps import Job, assert_same_steps, make_net, wrap_fsdp1, wrap_fsdp2
from support.ranks import Setting, on_ranks, this_device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)

import fsdp_doctor
from fsdp_doctor import examine
from fsdp_doctor.case import offloading

on_the_device = on_ranks(Setting("emulated", 2))
# What a framework makes of FSDP1 to offload it by hand, with and without the original parameters.
_FSDP1 = (
    functools.partial(wrap_fsdp1, use_orig_params=False),
    functools.partial(wrap_fsdp1, use_orig_params=True),
)


def has(job: Job, kind: str) -> bool:
    return kind in {finding.kind for finding in examine(job.model, job.optimizer).findings}


def make_with_buffer() -> nn.Module:
    net = make_net()
    net.register_buffer("scale", torch.full((3,), 2.0))
    net.register_forward_pre_hook(lambda module, inputs: (inputs[0] * module.scale,))
    return net


def offload(job: Job, *, non_blocking: bool = False) -> None:
    offloading.offload(job.model, non_blocking=non_blocking)


def bring_back(job: Job) -> None:
    offloading.load(job.model, this_device(), non_blocking=False)


def follow(
    kind: str, wrap: Callable[[Any], nn.Module], break_: Callable[[Job], object], remedy: Callable[[Job], object]
) -> None:
    """Breaks a job's model, finds it, carries out the remedy, and compares the next steps with a twin's."""
    job, twin = Job(wrap, make=make_with_buffer), Job(wrap, make=make_with_buffer)
    break_(job)
    assert has(job, kind), f"{kind} is not among {[finding.kind for finding in examine(job.model).findings]}"
    remedy(job)
    assert not has(job, kind)
    assert not examine(job.model, job.optimizer).bad
    assert_same_steps(job, twin)


@on_the_device
def test_the_remedies_for_a_manual_offload_lead_to_right_steps() -> None:
    follow("offloaded", wrap_fsdp2, offload, lambda job: job.model.to(this_device()))
    no_shard = functools.partial(wrap_fsdp1, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
    for wrap in (*_FSDP1, no_shard):
        follow("fsdp1-away", wrap, offload, bring_back)


@on_the_device
def test_the_remedies_for_a_model_in_part_elsewhere_lead_to_right_steps() -> None:
    other = torch.device("emulated", 1 - dist.get_rank())
    follow(
        "partly-moved",
        wrap_fsdp2,
        lambda job: job.find("1").to("cpu"),
        lambda job: job.model.to(this_device()),
    )
    follow(
        "partly-moved",
        wrap_fsdp2,
        lambda job: job.find("1").to("cpu"),
        lambda job: job.find("1").to(this_device()),
    )
    follow("elsewhere", wrap_fsdp2, lambda job: job.model.to(other), lambda job: job.model.to(this_device()))


def move_buffers(job: Job) -> None:
    for buffer in job.model.buffers():
        buffer.data = buffer.data.to(this_device())


@on_the_device
def test_the_remedy_for_buffers_that_were_left_behind_leads_to_right_steps() -> None:
    def leave(job: Job) -> None:
        job.model.scale = job.model.scale.cpu()

    follow("buffers-left-behind", wrap_fsdp2, leave, move_buffers)
    policy = functools.partial(wrap_fsdp2, offload_policy=CPUOffloadPolicy())
    follow("buffers-left-behind", policy, lambda job: job.model.to("cpu"), move_buffers)


def wrap_with_ignored(net: Any) -> nn.Module:
    net.to(this_device())
    net[0].requires_grad_(False)
    fully_shard(net[1])
    return fully_shard(net, ignored_params=set(net[0].parameters()))


@on_the_device
def test_the_remedy_for_ignored_parameters_elsewhere_leads_to_right_steps() -> None:
    def move(device: Any) -> Callable[[Job], object]:
        def move_ignored(job: Job) -> None:
            for parameter in job.net[0].parameters():  # type: ignore[index]
                parameter.data = parameter.data.to(device)

        return move_ignored

    follow("ignored-away", wrap_with_ignored, move("cpu"), move(this_device()))


@on_the_device
def test_the_remedy_for_a_copy_in_flight_leads_to_right_steps() -> None:
    def make_even() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 4))

    job, twin = (Job(wrap_fsdp2, make=make_even) for _ in range(2))
    right = {name: tensor.clone() for name, tensor in fsdp_doctor.full_tensors(twin.model)}
    torch.emulated.synchronize()
    offload(job, non_blocking=True)
    assert has(job, "copy-outstanding")
    torch.accelerator.synchronize()
    for name, shard in job.shards.items():
        whole = shard.to(this_device()).full_tensor()
        assert torch.equal(whole, right[name]), name
    job.model.to(this_device())
    assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_an_uneven_offload_leads_to_right_steps() -> None:
    lost = Job(wrap_fsdp2)
    torch.emulated.synchronize()
    offload(lost, non_blocking=True)
    assert has(lost, "uneven-nonblocking")
    torch.emulated.synchronize()
    job, twin = Job(wrap_fsdp2), Job(wrap_fsdp2)
    job.model.to("cpu")
    assert not has(job, "uneven-nonblocking")
    job.model.to(this_device())
    assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_gradients_that_an_offload_keeps_leads_to_right_steps() -> None:
    for wrap in _FSDP1:
        job, twin = Job(wrap), Job(wrap)
        for one in (job, twin):
            one.compute_loss(3).backward()
        offload(job)
        assert has(job, "gradients-kept"), wrap
        for one in (job, twin):
            one.optimizer.zero_grad()
        for module in FullyShardedDataParallel.fsdp_modules(job.model) if wrap is _FSDP1[1] else ():
            assert has(job, "gradients-kept")
            assert module._handle is not None
            module._handle.flat_param.grad = None
        assert not has(job, "gradients-kept")
        bring_back(job)
        assert_same_steps(job, twin)


@on_the_device
def test_the_remedies_for_an_offload_that_frees_nothing_lead_to_right_steps() -> None:
    no_shard = functools.partial(wrap_fsdp1, sharding_strategy=ShardingStrategy.NO_SHARD)
    in_bfloat16 = MixedPrecision(param_dtype=torch.bfloat16)
    for original in (False, True):
        kept = Job(functools.partial(no_shard, use_orig_params=original))
        offload(kept)
        assert has(kept, "offload-frees-nothing")
    for wrap in (
        *_FSDP1,
        *(functools.partial(no_shard, use_orig_params=o, mixed_precision=in_bfloat16) for o in (False, True)),
    ):
        job, twin = Job(wrap), Job(wrap)
        before = torch.emulated.memory_allocated()
        offload(job)
        assert not has(job, "offload-frees-nothing")
        assert before - torch.emulated.memory_allocated() >= sum(shard.nbytes for shard in job.shards.values())
        bring_back(job)
        assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_a_dictionary_that_is_held_gives_its_memory_back() -> None:
    job = Job(wrap_fsdp2)
    held = {name: tensor.clone() for name, tensor in fsdp_doctor.full_tensors(job.model)}
    assert has(job, "state-dict-held")
    before = torch.emulated.memory_allocated()
    size = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    del held
    assert before - torch.emulated.memory_allocated() >= size
    assert not has(job, "state-dict-held")
    assert_same_steps(job, Job(wrap_fsdp2))


@on_the_device
def test_the_remedy_for_pinned_memory_that_doubles_leads_to_right_steps() -> None:
    def make_large() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 1100), nn.Linear(1100, 1100), nn.Linear(1100, 5))

    job, twin = (
        Job(functools.partial(wrap_fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=pins)), make=make_large, steps=0)
        for pins in (False, True)
    )
    assert has(twin, "pinned-twice")
    assert not has(job, "pinned-twice")
    assert_same_steps(job, twin)


@on_the_device
def test_the_remedies_for_a_missing_cpu_backend_lead_to_right_steps() -> None:
    own = DeviceMesh.from_group(dist.new_group(backend="emulated"), "emulated", mesh_dim_names=("device_alone",))
    policy = CPUOffloadPolicy()
    alone = Job(functools.partial(wrap_fsdp2, offload_policy=policy, mesh=own), steps=0)
    both = Job(functools.partial(wrap_fsdp2, offload_policy=policy), steps=0)
    assert has(alone, "no-backend-for-cpu")
    assert not has(both, "no-backend-for-cpu")
    for job in (alone, both):
        job.compute_loss().backward()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        torch.nn.utils.clip_grad_norm_(alone.shards.values(), 0.1).full_tensor()  # type: ignore[attr-defined]
    torch.nn.utils.clip_grad_norm_(both.shards.values(), 0.1)
    whole = dict(fsdp_doctor.full_tensors(both.model))
    for name, tensor in fsdp_doctor.full_tensors(alone.model):
        assert torch.equal(tensor, whole[name]), name


@on_the_device
def test_the_remedy_for_two_memories_of_fsdp1_leads_to_right_steps() -> None:
    in_bfloat16 = MixedPrecision(param_dtype=torch.bfloat16)
    for wrap in (*_FSDP1, *(functools.partial(wrap, mixed_precision=in_bfloat16) for wrap in _FSDP1)):
        job, twin = Job(wrap), Job(wrap)
        job.model.cpu()
        job.model.to(this_device())
        assert has(job, "second-memory")
        with FullyShardedDataParallel.summon_full_params(job.model):
            pass
        job.optimizer.zero_grad()
        assert not has(job, "second-memory")
        assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_offloaded_fsdp1_that_was_moved_leads_to_right_steps() -> None:
    for use_orig_params in (False, True):
        for steps in (0, 2):
            wrap = functools.partial(
                wrap_fsdp1, use_orig_params=use_orig_params, cpu_offload=CPUOffload(offload_params=True)
            )
            job, twin = (Job(wrap, make=make_with_buffer, steps=steps) for _ in range(2))
            job.model.to(this_device())
            (found,) = examine(job.model, job.optimizer).bad
            assert (found.kind, 'model.to("cpu")' in found.remedy) == (
                "half-moved" if steps else "policy-shards-off-cpu",
                True,
            )
            job.model.to("cpu")
            move_buffers(job)
            assert not has(job, found.kind)
            assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_a_stray_piece_leads_to_right_steps() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        net[1].weight = net[0].weight
        return net

    def wrap_apart(net: Any) -> nn.Module:
        net[0] = FullyShardedDataParallel(net[0], device_id=this_device(), use_orig_params=True)
        return FullyShardedDataParallel(net, device_id=this_device(), use_orig_params=True)

    def wrap_together(net: Any) -> nn.Module:
        return FullyShardedDataParallel(net, device_id=this_device(), use_orig_params=True)

    assert has(Job(wrap_apart, make=make, steps=0), "stray-piece")
    job = Job(wrap_together, make=make, steps=0)
    assert not has(job, "stray-piece")
    plain = make().to(this_device())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for seed in range(2):
        job.step(seed)
        losses = []
        for rank in range(2):
            generator = torch.Generator().manual_seed(10 * seed + rank)
            losses.append(plain(torch.randn(4, 3, generator=generator).to(this_device())).square().sum())
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    state = plain.state_dict()
    for name, tensor in fsdp_doctor.full_tensors(job.model):
        torch.testing.assert_close(tensor, state[name])


@on_the_device
def test_the_remedy_for_shards_lost_by_a_move_leads_to_right_steps() -> None:
    for wrap in _FSDP1:
        job, twin = Job(wrap), Job(wrap)
        checkpoint = {name: tensor.clone() for name, tensor in fsdp_doctor.full_tensors(twin.model)}
        job.raise_in("2", "forward")
        offload(job)
        assert has(job, "shard-lost"), wrap
        built_again = Job(wrap, steps=0)
        fsdp_doctor.load_full_tensors(built_again.model, checkpoint)
        twin.make_optimizer()
        assert_same_steps(built_again, twin)
