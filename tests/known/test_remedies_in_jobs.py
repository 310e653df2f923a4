"""Remedies of the catalogue for a user's own loop: each failure is made, and after the remedy the steps are right."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.broken_steps import Job, assert_same_steps, make_net, wrap_fsdp1, wrap_fsdp2
from support.ranks import Setting, on_ranks, this_device, this_rank
from support.saving import new_directory
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    fully_shard,
)

from fsdp_doctor.known.catalogue import match_message

on_the_device = on_ranks(Setting("emulated", 2))
_FULL = StateDictOptions(full_state_dict=True)


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 6, bias=False)
        self.down = nn.Linear(3, 6, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.down.weight = self.up.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.up(hidden).tanh() + self.down(hidden)


def make_tied() -> TiedNet:
    torch.manual_seed(0)
    return TiedNet()


def wrap_with_orig(net: nn.Module) -> nn.Module:
    return wrap_fsdp1(net, use_orig_params=True)  # type: ignore[arg-type]


@on_the_device
def test_a_dtensor_that_is_moved_whole_trains_on() -> None:
    broken, job, twin = (Job(wrap_fsdp2) for _ in range(3))
    for parameter in broken.model.parameters():
        parameter._local_tensor = parameter._local_tensor.cpu()
    with pytest.raises(RuntimeError, match="Attempted to set the storage"):
        broken.model.state_dict()
    for place in (torch.device("cpu"), this_device()):
        job.model.to(place)
        job.model.state_dict()
    assert_same_steps(job, twin)


@on_the_device
def test_weights_that_are_tied_again_after_meta_train_as_one() -> None:
    def materialize(*, tie: bool) -> Any:
        net = make_tied()
        weights = net.state_dict()
        net.to("meta")
        net.to_empty(device=this_device())
        if tie:
            net.tie_weights()
        # A loader that reads one name of the two, as a checkpoint of a tied model has them.
        net.load_state_dict({"up.weight": weights["up.weight"]}, strict=False)
        return net

    untied = materialize(tie=False)
    assert untied.up.weight is not untied.down.weight
    for wrap in (lambda net: FullyShardedDataParallel(net, device_id=this_device()), fully_shard):
        twin = Job(lambda net, wrap=wrap: wrap(net.to(this_device())), make=make_tied)  # type: ignore[misc]
        assert_same_steps(Job(wrap, make=lambda: materialize(tie=True)), twin)


@on_the_device
def test_weights_assigned_within_summon_full_params_are_those_that_train() -> None:
    broken, job, twin = (Job(wrap_with_orig) for _ in range(3))
    other = make_net(seed=1).state_dict()
    broken.find("3").weight = nn.Parameter(torch.zeros(7, 6, device=this_device()))
    with pytest.raises(RuntimeError, match="Cannot writeback when the parameter shape changes"):
        broken.compute_loss()
    with FullyShardedDataParallel.summon_full_params(job.model, writeback=True), torch.no_grad():
        for name, parameter in job.model.named_parameters():
            parameter.copy_(other[name.replace("_fsdp_wrapped_module.", "")])
    set_model_state_dict(twin.model, other, options=_FULL)
    assert_same_steps(job, twin)


@on_the_device
def test_a_shape_that_is_changed_before_wrapping_trains() -> None:
    def make_wider() -> nn.Module:
        net = make_net()
        net[3] = nn.Linear(6, 7)
        return net

    assert_same_steps(Job(wrap_with_orig, make=make_wider), Job(wrap_fsdp1, make=make_wider), count=0)
    assert Job(wrap_with_orig, make=make_wider).step()[0] == Job(wrap_fsdp1, make=make_wider).step()[0]


@on_the_device
def test_a_job_that_runs_the_outermost_module_first_runs_its_parts_later() -> None:
    broken = Job(wrap_fsdp1, steps=0)
    hidden = torch.ones(4, 6, device=this_device())
    broken.net[1](hidden)
    with pytest.raises(AssertionError, match="_is_root"):
        broken.compute_loss()
    job, twin = Job(wrap_fsdp1, steps=1), Job(wrap_fsdp1, steps=1)
    with torch.no_grad():
        job.net[1](hidden)
    assert_same_steps(job, twin)


@on_the_device
def test_names_without_the_wrappers_words_are_those_of_the_engine() -> None:
    def wrap(net: nn.Sequential) -> nn.Module:
        net[1] = checkpoint_wrapper(net[1])
        return wrap_fsdp1(net, use_orig_params=True)

    job = Job(wrap)
    engine = make_net(seed=1).to(this_device())
    with FullyShardedDataParallel.summon_full_params(job.model):
        weights = {name: parameter.detach().clone() for name, parameter in job.model.named_parameters()}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        engine.load_state_dict(weights)
    for word in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        weights = {name.replace(word, ""): tensor for name, tensor in weights.items()}
    engine.load_state_dict(weights)
    inputs = torch.ones(2, 3, device=this_device())
    assert torch.equal(engine(inputs), job.model(inputs))


@on_the_device
def test_weights_loaded_after_the_initialization_are_those_that_train() -> None:
    twin = Job(wrap_fsdp2, steps=0)
    weights = get_model_state_dict(twin.model, options=_FULL)
    dist.broadcast_object_list(sent := [{n: t.cpu() for n, t in weights.items()} if this_rank() == 0 else None])

    def build(*, load_first: bool) -> Job:
        job = Job(wrap_fsdp2, make=lambda: make_net(seed=1), steps=0)

        def load() -> None:
            set_model_state_dict(job.model, dict(sent[0]), options=_FULL)  # type: ignore[arg-type]

        def initialize() -> None:
            torch.manual_seed(2)
            for module in job.model.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()

        for act in (load, initialize) if load_first else (initialize, load):
            act()
        return job

    assert build(load_first=True).step(1)[0] != Job(wrap_fsdp2, steps=0).step(1)[0]
    assert_same_steps(build(load_first=False), twin)


@on_the_device
def test_an_unflattened_optimizer_state_loads_where_a_parameter_has_no_gradient() -> None:
    def make_with_unused() -> nn.Module:
        net = make_net()
        net[1].unused = nn.Parameter(torch.ones(4))
        return net

    def resume(*, flatten: bool) -> Job:
        job = Job(wrap_fsdp2, make=make_with_unused)
        options = StateDictOptions(flatten_optimizer_state_dict=flatten, strict=False)
        state = get_optimizer_state_dict(job.model, job.optimizer, options=options)
        job.make_optimizer()
        set_optimizer_state_dict(job.model, job.optimizer, state, options=options)
        return job

    with pytest.raises(TypeError, match="float"):
        resume(flatten=True).step()
    job = resume(flatten=False)
    job.shards = {name: shard for name, shard in job.shards.items() if "unused" not in name}
    assert_same_steps(job, Job(wrap_fsdp2))


@on_the_device
def test_a_model_built_in_the_checkpoints_dtype_keeps_it() -> None:
    def wrap(net: nn.Sequential) -> nn.Module:
        return wrap_fsdp1(net.bfloat16(), use_orig_params=True)

    def compute_loss(seed: int = 0) -> torch.Tensor:
        return narrow.model(torch.full((4, 3), 1.0 + seed, device=this_device(), dtype=torch.bfloat16)).sum()  # type: ignore[no-any-return]

    narrow = Job(wrap, steps=0)
    with new_directory() as directory:
        dcp.save({"model": get_model_state_dict(narrow.model)}, checkpoint_id=directory)
        expected = compute_loss()
        for built, dtype in ((wrap_with_orig, torch.float32), (wrap, torch.bfloat16)):
            job = Job(built, make=lambda: make_net(seed=1), steps=0)  # type: ignore[arg-type]
            state = {"model": get_model_state_dict(job.model)}
            dcp.load(state, checkpoint_id=directory)
            set_model_state_dict(job.model, state["model"])
            assert {parameter.dtype for parameter in job.model.parameters()} == {dtype}
        narrow = job
        assert torch.equal(compute_loss(), expected)


@on_the_device
def test_the_directory_that_has_the_metadata_loads() -> None:
    saved, job = Job(wrap_fsdp2), Job(wrap_fsdp2, make=lambda: make_net(seed=1), steps=0)
    with new_directory() as directory:
        dcp.save({"model": saved.model.state_dict()}, checkpoint_id=directory / "model")
        for place, expected in (
            (directory, pytest.raises(dcp.api.CheckpointException)),
            (directory / "model", contextlib.nullcontext()),
        ):
            state = {"model": job.model.state_dict()}
            with expected:
                dcp.load(state, checkpoint_id=place)
        assert job.step(1)[0] == saved.step(1)[0]


class _Unpicklable(RuntimeError):
    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle '_thread.lock' object")


class _RaisingPlanner(dcp.DefaultLoadPlanner):
    def load_bytes(self, *arguments: Any) -> None:
        raise _Unpicklable("the cause")

    resolve_tensor = load_bytes  # type: ignore[assignment]


@on_the_device
def test_a_load_on_one_rank_alone_shows_the_exception() -> None:
    job = Job(wrap_fsdp2)
    with new_directory() as directory:
        weights = {name: torch.ones(3) for name in ("first", "second")}
        dcp.save(dict(weights), checkpoint_id=directory)
        with pytest.raises(TypeError, match="cannot pickle"):
            dcp.load(dict(weights), checkpoint_id=directory, planner=_RaisingPlanner())
        dist.barrier()
        if this_rank() == 0:
            with pytest.raises(dcp.api.CheckpointException, match="the cause"):
                dcp.load(dict(weights), checkpoint_id=directory, planner=_RaisingPlanner(), no_dist=True)
        dist.barrier()
        dcp.load(weights, checkpoint_id=directory)
        assert_same_steps(job, Job(wrap_fsdp2))


_SAVE = """
import torch, torch.distributed as dist
from torch.distributed.tensor import init_device_mesh, distribute_tensor, Shard
dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
torch.save(distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [Shard(0)]), {file!r})
dist.destroy_process_group()
"""
_LOAD = """
import torch{more}
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
print(torch.load({file!r}, weights_only=True).to_local().tolist())
"""


def test_an_import_before_the_load_lets_it_read_a_dtensor(tmp_path: pathlib.Path) -> None:
    file = str(tmp_path / "weight.pt")

    def run_python(code: str, **words: str) -> subprocess.CompletedProcess[str]:
        text = code.format(file=file, store=tmp_path / f"store-{len(list(tmp_path.iterdir()))}", **words)
        return subprocess.run([sys.executable, "-W", "ignore", "-c", text], capture_output=True, text=True)

    assert run_python(_SAVE).returncode == 0
    refused = run_python(_LOAD, more="")
    read = run_python(_LOAD, more=", torch.distributed.tensor")
    assert (read.returncode, read.stdout) == (0, "[0.0, 1.0, 2.0, 3.0]\n"), read
    assert "FD193" in {entry.short_code for entry in match_message(refused.stderr, refused.stderr)}, refused.stderr


@on_the_device
def test_weights_that_are_tied_on_meta_before_sharding_train_as_one() -> None:
    def wrap(net: Any, *, tie: bool) -> nn.Module:
        weights = net.state_dict()
        net.to("meta")
        if tie:
            net.tie_weights()
        sharded = fully_shard(net).to_empty(device=this_device())
        set_model_state_dict(sharded, weights, options=_FULL)
        return sharded

    broken = Job(functools.partial(wrap, tie=False), make=make_tied, steps=1)
    assert broken.net.up.weight is not broken.net.down.weight
    job = Job(functools.partial(wrap, tie=True), make=make_tied, steps=0)
    assert_same_steps(job, Job(lambda net: fully_shard(net.to(this_device())), make=make_tied, steps=0))


@on_the_device
def test_a_mesh_flattened_to_one_dimension_shards_over_all_of_it() -> None:
    def wrap(net: Any, *, flatten: bool) -> nn.Module:
        mesh = init_device_mesh(this_device().type, (2, 1), mesh_dim_names=("dp_shard", "cp"))
        if flatten:
            mesh = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        return wrap_fsdp2(net, mesh=mesh)

    whole, job = (Job(functools.partial(wrap, flatten=flatten)) for flatten in (False, True))
    twin = Job(wrap_fsdp2)

    def count(one: Job) -> int:
        return sum(shard.to_local().numel() for shard in one.shards.values())

    assert count(whole) > count(job) == count(twin)
    assert_same_steps(job, twin)


@on_the_device
def test_local_shards_that_are_initialized_draw_other_numbers_on_each_rank() -> None:
    def initialize(job: Job, *, local: bool) -> list[bool]:
        torch.manual_seed(this_rank())
        drawn = []
        for _ in range(2):
            for shard in job.shards.values():
                torch.nn.init.normal_(shard.to_local() if local else shard, std=0.02)
            weight = job.shards["1.up.weight"].to_local()
            drawn.append(weight.detach().clone())
        return [torch.equal(*drawn)]

    offloaded = functools.partial(wrap_fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False))
    broken, job = Job(offloaded, steps=0), Job(offloaded, steps=0)
    assert initialize(broken, local=False) == [True]
    assert initialize(job, local=True) == [False]
    first, second = job.step(1)[0], job.step(1)[0]
    assert second < first


class _WithOwnExperts(nn.Module):
    """Experts of its own on each rank, as expert parallelism divides them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(3, 5)
        self.experts = nn.Parameter(torch.full((5,), 1.0 + this_rank()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dense(hidden) * self.experts


class _ExpertJob(Job):
    def make_optimizer(self) -> None:
        """Makes one that steps tensor by tensor: experts are plain tensors beside DTensors."""
        super().make_optimizer()
        self.optimizer = torch.optim.AdamW(self.shards.values(), lr=0.05, foreach=False)


@on_the_device
def test_experts_left_out_of_a_broadcast_keep_what_each_rank_loads() -> None:
    def wrap(net: nn.Module) -> nn.Module:
        net.to(this_device())
        fully_shard(net, ignored_params={net.experts})  # type: ignore[arg-type]
        return net

    def load(job: Job, *, whole: bool) -> None:
        state = {name: tensor.cpu() for name, tensor in get_model_state_dict(twin.model, options=_FULL).items()}
        own = twin.model.experts.detach().clone()
        if not whole:
            state.pop("experts", None)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=whole)
        set_model_state_dict(job.model, state if this_rank() == 0 else {}, options=options)
        if not whole:
            job.model.experts.data.copy_(own)

    def make_zeros() -> nn.Module:
        net = _WithOwnExperts()
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        return net

    twin = _ExpertJob(wrap, make=_WithOwnExperts, steps=1)
    broken, job = (_ExpertJob(wrap, make=make_zeros, steps=0) for _ in range(2))
    load(broken, whole=True)
    load(job, whole=False)
    if this_rank() == 1:
        assert not torch.equal(broken.model.experts, twin.model.experts)
    for one in (twin, job):
        one.make_optimizer()
    assert_same_steps(job, twin)
