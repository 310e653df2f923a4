"""Remedies of ``examine`` for what loads, ties, casts and optimizers leave, carried out to two right steps."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
from support.broken_steps import Job, assert_same_steps, make_net, wrap_fsdp2
from support.ranks import Setting, on_ranks, this_device
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fsdp_doctor
from fsdp_doctor import examine
from fsdp_doctor.examination.findings import Finding

on_the_device = on_ranks(Setting("emulated", 2))
_FULL = StateDictOptions(full_state_dict=True)


def find(job: Job, kind: str) -> Finding:
    found = examine(job.model, job.optimizer).findings
    (finding,) = [finding for finding in found if finding.kind == kind]
    return finding


def has(job: Job, kind: str) -> bool:
    return kind in {finding.kind for finding in examine(job.model, job.optimizer).findings}


class TyingNet(nn.Module):
    """A net with the words of transformers 5 for its tie."""

    _tied_weights_keys = {"head.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(tie_word_embeddings=True)
        self.embed = nn.Linear(6, 3, bias=False)
        self.body = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 3, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(self.body(hidden))))  # type: ignore[no-any-return]


def make_tied() -> TyingNet:
    torch.manual_seed(0)
    return TyingNet()


def wrap_tied(net: Any) -> nn.Module:
    net.to(this_device())
    fully_shard(net.body)
    return fully_shard(net)


def wrap_from_meta(net: Any) -> nn.Module:
    """Builds on meta, shards, and loads what rank 0 has read, as a framework does."""
    full = {name: tensor.clone().to(this_device()) for name, tensor in net.state_dict().items()}
    with torch.device("meta"):
        model = type(net)()
    fully_shard(model.body)
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
    return model  # type: ignore[no-any-return]


def wrap_fsdp1_tied(net: Any) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=this_device(), use_orig_params=True)


def wrap_fsdp1_untied(net: Any) -> nn.Module:
    net.head.weight = nn.Parameter(net.embed.weight.detach().clone())
    return wrap_fsdp1_tied(net)


def wrap_untied(net: Any) -> nn.Module:
    """Moves a model to meta entry by entry before it shards it, as a framework does."""
    net.to(this_device())
    net.head.weight = nn.Parameter(net.embed.weight.detach().clone())
    return wrap_tied(net)


@on_the_device
def test_the_remedy_for_a_tie_broken_by_loading_leads_to_right_steps() -> None:
    job, twin = Job(wrap_from_meta, make=make_tied, steps=0), Job(wrap_tied, make=make_tied, steps=0)
    assert "before the first forward" in find(job, "untied").remedy
    job.model.tie_weights()
    job.make_optimizer()
    assert not has(job, "untied")
    assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_a_tie_broken_before_sharding_leads_to_right_steps() -> None:
    for wrap, untie in ((wrap_tied, wrap_untied), (wrap_fsdp1_tied, wrap_fsdp1_untied)):
        for steps in (0, 2):
            twin = Job(wrap, make=make_tied)
            weights = {name: tensor.clone() for name, tensor in fsdp_doctor.full_tensors(twin.model)}
            job = Job(untie, make=make_tied, steps=steps)
            assert "build" in find(job, "untied").remedy
            built_again = Job(wrap, make=make_tied, steps=0)
            fsdp_doctor.load_full_tensors(built_again.model, weights)
            twin.make_optimizer()
            assert not has(built_again, "untied")
            assert_same_steps(built_again, twin)


@on_the_device
def test_the_remedies_for_an_optimizer_made_before_loading_lead_to_right_steps() -> None:
    for names in (None, ("0.", "1.")):
        job, twin = (Job(wrap_fsdp2, steps=0) for _ in range(2))
        state = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
        job.model.load_state_dict(
            {name: tensor for name, tensor in state.items() if names is None or name.startswith(names)},
            assign=True,
            strict=names is None,
        )
        kind = "optimizer-holds-none" if names is None else "optimizer-holds-some"
        assert has(job, kind)
        job.make_optimizer()
        assert not has(job, kind)
        assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_rounded_moments_leads_to_right_steps() -> None:
    twin = Job(wrap_fsdp2)
    moments = get_optimizer_state_dict(twin.model, twin.optimizer, options=_FULL)
    weights = dict(fsdp_doctor.full_tensors(twin.model))
    job = Job(lambda net: wrap_fsdp2(net.bfloat16()), steps=0)
    set_optimizer_state_dict(job.model, job.optimizer, moments, options=_FULL)
    job.model.float()
    fsdp_doctor.load_full_tensors(job.model, weights)
    assert has(job, "moments-rounded")
    fsdp_doctor.load_optimizer_state(job.model, job.optimizer, moments)
    assert not has(job, "moments-rounded")
    assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_an_assigned_parameter_leads_to_right_steps() -> None:
    job, twin = Job(wrap_fsdp2), Job(wrap_fsdp2)
    for one in (job, twin):
        own = one.find("3").weight
        values = own.detach() * 2
        if one is twin:
            with torch.no_grad():
                own.copy_(values)
            continue
        one.find("3").weight = nn.Parameter(values)
        assert has(one, "replaced")
        assigned = one.find("3").weight
        one.model.unshard()
        one.model.reshard()
        with torch.no_grad():
            one.find("3").weight.copy_(assigned)
        assert not has(one, "replaced")
    assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_replaced_memory_leads_to_right_steps() -> None:
    for policy in (OffloadPolicy(), CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
        job, twin = (Job(lambda net: wrap_fsdp2(net, offload_policy=policy)) for _ in range(2))  # noqa: B023
        for one in (job, twin):
            own = one.find("1.up").weight
            assert isinstance(own, nn.Parameter)
            values = own.detach() * 2
            if one is twin:
                with torch.no_grad():
                    own.copy_(values)
                continue
            torch.utils.swap_tensors(own, nn.Parameter(values))
            assert find(one, "memory-replaced").names == ("1.up.weight",)
            one.model.load_state_dict(one.model.state_dict())
            assert not has(one, "memory-replaced")
        assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_a_late_cast_leads_to_right_steps() -> None:
    job, twin = Job(wrap_fsdp2), Job(wrap_fsdp2)
    job.model.half()
    assert has(job, "recast")
    job.model.float()
    assert not has(job, "recast")
    with torch.no_grad():
        for shard in twin.shards.values():
            shard.copy_(shard.half().float())
    assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_a_unit_of_two_dtypes_leads_to_right_steps() -> None:
    def make(apart: bool) -> nn.Module:
        net = make_net()
        net.get_submodule("1.up").bfloat16()
        return net if apart else net.float()

    job = Job(wrap_fsdp2, make=lambda: make(apart=True), steps=0)
    twin = Job(wrap_fsdp2, make=lambda: make(apart=False), steps=0)
    assert has(job, "mixed-dtypes")
    job.model.float()
    assert not has(job, "mixed-dtypes")
    assert_same_steps(job, twin)


@on_the_device
def test_the_remedy_for_a_disabled_all_reduce_leads_to_right_steps() -> None:
    mesh = init_device_mesh("emulated", (2, 1), mesh_dim_names=("replicate", "shard"))
    job, twin = (Job(lambda net: wrap_fsdp2(net, mesh=mesh)) for _ in range(2))
    for one in (job, twin):
        one.model.set_requires_all_reduce(False)
        one.compute_loss(3).backward()
    assert has(job, "gradients-unreplicated")
    for one in (job, twin):
        one.model.set_requires_all_reduce(True)
    assert not has(job, "gradients-unreplicated")
    assert_same_steps(job, twin)


def wrap_without_root(net: nn.Module) -> nn.Module:
    net.to(this_device())
    for name in ("1", "2"):
        fully_shard(net.get_submodule(name))
    return net


@on_the_device
def test_the_remedies_for_what_trains_beside_the_shards_lead_to_right_steps() -> None:
    job, twin = Job(wrap_without_root, steps=0), Job(wrap_fsdp2, steps=0)
    assert has(job, "gradients-unmanaged")
    job.model = fully_shard(job.model)
    job.make_optimizer()
    assert not has(job, "gradients-unmanaged")
    assert_same_steps(job, twin)

    job, twin = Job(wrap_without_root, steps=0), Job(wrap_fsdp2, steps=0)
    job.optimizer = torch.optim.AdamW(job.shards.values(), lr=0.05, foreach=False)
    for seed in range(2):
        for one in (job, twin):
            one.optimizer.zero_grad()
            one.compute_loss(seed).backward()
        for name, shard in job.shards.items():
            if not isinstance(shard, DTensor):
                assert shard.grad is not None
                dist.all_reduce(shard.grad)
                shard.grad /= 2
                right = twin.shards[name].grad
                assert isinstance(right, DTensor)
                assert torch.equal(shard.grad, right.full_tensor()), name
        for one in (job, twin):
            one.optimizer.step()


@on_the_device
def test_the_remedy_for_buffers_on_meta_leads_to_right_steps() -> None:
    def make() -> nn.Module:
        net = make_net()
        net.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        net.register_forward_pre_hook(lambda module, inputs: (inputs[0] * module.scale,))
        return net

    twin = Job(wrap_fsdp2, make=make, steps=0)
    weights = {name: tensor.clone() for name, tensor in fsdp_doctor.full_tensors(twin.model)}
    job = Job(wrap_fsdp2, make=make, steps=0)
    with torch.device("meta"):
        net = make()
    for name in ("1", "2"):
        fully_shard(net.get_submodule(name))
    job.net, job.model = net, fully_shard(net)
    set_model_state_dict(job.model, weights, options=_FULL)
    assert find(job, "meta").names == ("scale",)
    job.model.scale = torch.full((3,), 2.0, device=this_device())
    job.make_optimizer()
    assert not has(job, "meta")
    assert_same_steps(job, twin)


class Counting(nn.Linear):
    """A layer with state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(hidden) * self.calls

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@on_the_device
def test_the_remedy_for_state_that_is_no_tensor_leads_to_right_steps() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Counting(), nn.Linear(3, 3))

    def wrap(net: nn.Module) -> nn.Module:
        return fully_shard(net.to(this_device()))

    twin, job = Job(wrap, make=make), Job(wrap, make=make, steps=0)
    assert has(job, "extra-state")
    fsdp_doctor.load_full_tensors(job.model, dict(fsdp_doctor.full_tensors(twin.model)))
    job.net[0].set_extra_state(twin.net[0].get_extra_state())
    for one in (job, twin):
        one.make_optimizer()
    assert_same_steps(job, twin)


class Shadowing(nn.Linear):
    """Module whose child is called as torch.compile calls what it wraps, unless it is renamed."""

    def __init__(self, child: str) -> None:
        super().__init__(3, 3)
        self.child = child
        self.register_module(child, nn.Linear(3, 3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.child)(super().forward(hidden))  # type: ignore[no-any-return]


@on_the_device
def test_the_remedy_for_two_names_that_become_one_leads_to_right_steps() -> None:
    def make(child: str) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Shadowing(child))

    def wrap(net: nn.Module) -> nn.Module:
        return fully_shard(net.to(this_device()))

    assert has(Job(wrap, make=lambda: make("_orig_mod")), "ambiguous-names")
    twin, renamed = Job(wrap, make=lambda: make("second")), Job(wrap, make=lambda: make("second"), steps=0)
    assert not has(renamed, "ambiguous-names")
    fsdp_doctor.load_full_tensors(renamed.model, dict(fsdp_doctor.full_tensors(twin.model)), strict=True)
    twin.make_optimizer()
    assert_same_steps(renamed, twin)
