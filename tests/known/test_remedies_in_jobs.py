"""Remedies of the catalogue for a user's own loop: each failure is made, and after the remedy the steps are right."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from support.broken_steps import Job, assert_same_steps, make_net, wrap_fsdp1, wrap_fsdp2
from support.ranks import Setting, of_all_ranks, on_ranks, this_device, this_rank
from support.saving import new_directory
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
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
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Qwen3Config, Qwen3ForCausalLM

from fsdp_doctor import compare_fingerprints, fingerprint_tensors, load_full_tensors
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


@on_the_device
def test_entries_broadcast_by_sorted_name_load_beside_entries_of_one_rank() -> None:
    twin = Job(wrap_fsdp2, steps=0)
    job = Job(wrap_fsdp2, make=lambda: make_net(seed=1), steps=0)
    shapes = {name: parameter.shape for name, parameter in job.model.named_parameters()}
    full: dict[str, torch.Tensor] = {"1.up.scale": torch.ones(1)} if this_rank() == 0 else {}
    full |= {name: tensor.cpu() for name, tensor in get_model_state_dict(twin.model, options=_FULL).items()}
    assert [name for name, _ in zip(full, shapes, strict=False)] != list(shapes) or this_rank() == 1
    state = {}
    for name in sorted(shapes):
        tensor = full[name].to(this_device()) if this_rank() == 0 else torch.empty(shapes[name], device=this_device())
        dist.broadcast(tensor, 0)
        state[name] = tensor
    set_model_state_dict(job.model, state, options=_FULL)
    assert_same_steps(job, twin)


@on_ranks(Setting("emulated", 4))
def test_shards_redistributed_before_a_save_are_contiguous_rows() -> None:
    def wrap(net: nn.Sequential) -> nn.Module:
        mesh = init_device_mesh(this_device().type, (2, 2), mesh_dim_names=("fsdp", "tp"))
        net.to(this_device())
        for layer in (net[1], net[2]):
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(net, mesh=mesh["fsdp"])

    job, twin = Job(wrap, steps=1), Job(wrap, steps=1)
    strided = job.model.get_submodule("1.up").weight
    whole = strided.full_tensor()

    def join(tensor: DTensor) -> torch.Tensor:
        return torch.cat(of_all_ranks(tensor.to_local().cpu()))

    plain = strided.redistribute(placements=[Replicate(), Shard(0)])
    joined = torch.cat(of_all_ranks(plain.to_local().cpu())[:2])
    assert not torch.equal(join(strided), whole.cpu())
    assert torch.equal(joined, whole.cpu())
    assert_same_steps(job, twin)


@on_the_device
def test_state_dicts_of_torchs_own_functions_fit_another_wrapping() -> None:
    saved = Job(functools.partial(wrap_fsdp1, use_orig_params=False))

    def wrap_once(net: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(net, device_id=this_device(), use_orig_params=True)

    def load(take: Callable[[Job], Any], put: Callable[[Job, Any], Any], directory: pathlib.Path) -> Job:
        dcp.save({"model": take(saved)}, checkpoint_id=directory)
        job = Job(wrap_once, make=lambda: make_net(seed=1), steps=0)
        state = {"model": take(job)}
        dcp.load(state, checkpoint_id=directory)
        put(job, state["model"])
        return job

    def take_local(job: Job) -> Any:
        with FullyShardedDataParallel.state_dict_type(job.model, StateDictType.LOCAL_STATE_DICT):
            return job.model.state_dict()

    with new_directory() as directory, pytest.raises((dcp.api.CheckpointException, RuntimeError)):
        load(take_local, lambda job, state: job.model.load_state_dict(state), directory)
    with new_directory() as directory:
        job = load(
            lambda job: get_model_state_dict(job.model),
            lambda job, state: set_model_state_dict(job.model, state),
            directory,
        )
    assert job.step(1)[0] == saved.step(1)[0]


@on_the_device
def test_torchs_converter_writes_a_sharded_checkpoint_as_one_file() -> None:
    job, twin = Job(wrap_fsdp2), Job(wrap_fsdp2)
    full = get_model_state_dict(job.model, options=_FULL)
    with new_directory() as directory:
        dcp.save({"state_dict": job.model.state_dict()}, checkpoint_id=directory)
        if this_rank() == 0:
            dcp_to_torch_save(directory, directory / "whole.pt")
            written = torch.load(directory / "whole.pt")["state_dict"]
            assert all(torch.equal(written[name].cpu(), tensor.cpu()) for name, tensor in full.items())
    assert_same_steps(job, twin)


def test_what_is_read_in_its_own_dtype_and_copied_reaches_the_experts() -> None:
    saved = {str(index): torch.full((4, 4), 2.0 + index) for index in range(3)}

    def load(*, copies: bool) -> torch.Tensor:
        experts = nn.Parameter(torch.zeros(3, 4, 4, dtype=torch.float32))
        with torch.no_grad():
            for index in range(3):
                view = experts[index]
                place = torch.empty(4, 4) if copies else view.to(torch.float8_e4m3fn)
                place.copy_(saved[str(index)])
                if copies:
                    view.copy_(place)
        return experts.detach()

    expected = fingerprint_tensors(saved)
    assert compare_fingerprints(expected, fingerprint_tensors({str(i): t for i, t in enumerate(load(copies=False))}))
    assert not compare_fingerprints(expected, fingerprint_tensors({str(i): t for i, t in enumerate(load(copies=True))}))


@on_the_device
def test_a_norm_summed_over_all_experts_clips_alike_on_every_rank() -> None:
    def wrap(net: nn.Module) -> nn.Module:
        net.to(this_device())
        fully_shard(net, ignored_params={net.experts})  # type: ignore[arg-type]
        return net

    def clip(job: Job, *, over_experts: bool) -> tuple[float, torch.Tensor]:
        job.compute_loss(1).backward()
        dense = [shard for shard in job.shards.values() if isinstance(shard, DTensor)]
        squares = torch.nn.utils.get_total_norm([shard.grad for shard in dense]).full_tensor() ** 2  # type: ignore[union-attr]
        of_experts = job.model.experts.grad.square().sum()
        if over_experts:
            dist.all_reduce(of_experts)
        norm = float((squares + of_experts).sqrt())
        for shard in job.shards.values():
            shard.grad.mul_(min(1.0, 0.5 / norm))
        own = sum(float(shard.grad.to_local().square().sum()) for shard in dense)
        experts = float(job.model.experts.grad.square().sum())
        return norm, torch.tensor(own + experts)

    norms = of_all_ranks(clip(_ExpertJob(wrap, make=_WithOwnExperts, steps=0), over_experts=False)[0])
    assert norms[0] != norms[1]
    job = _ExpertJob(wrap, make=_WithOwnExperts, steps=0)
    norm, clipped = clip(job, over_experts=True)
    assert len({*of_all_ranks(norm)}) == 1
    assert sum(map(float, of_all_ranks(clipped))) ** 0.5 == pytest.approx(0.5, rel=1e-5)
    job.optimizer.step()


def _make_adapted(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    net = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2))
    adapted = get_peft_model(net, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter)
    return adapted


def _shard_adapted(net: Any) -> Any:
    net.to(this_device())
    for layer in net.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(net)


@on_the_device
def test_an_adapter_written_of_a_gathered_state_has_every_module_to_save() -> None:
    plain = _make_adapted()
    sharded = _shard_adapted(_make_adapted())
    with new_directory() as directory:
        state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if this_rank() == 0:
            sharded.save_pretrained(directory, state_dict=state)
            expected = get_peft_model_state_dict(plain)
            written = load_file(directory / "adapter_model.safetensors")
            assert written.keys() == expected.keys()
            assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    sharded(torch.ones(1, 4, dtype=torch.long, device=this_device())).logits.sum().backward()


@on_the_device
def test_an_adapter_load_that_reports_unexpected_names_loaded_nothing() -> None:
    adapter = {name: tensor + 1 for name, tensor in get_peft_model_state_dict(_make_adapted()).items()}
    wrapped = _make_adapted()
    wrapped.base_model.model.model.layers[0] = FullyShardedDataParallel(
        wrapped.base_model.model.model.layers[0], device_id=this_device(), use_orig_params=True
    )
    layer = "layers.0."
    refused = set_peft_model_state_dict(wrapped, adapter)
    assert any(layer in name for name in refused.unexpected_keys)
    plain = _make_adapted()
    taken = set_peft_model_state_dict(plain, adapter)
    assert not taken.unexpected_keys
    now = get_peft_model_state_dict(plain)
    assert all(torch.equal(now[name], tensor) for name, tensor in adapter.items())
    load_full_tensors(sharded := _shard_adapted(_make_adapted(seed=1)), plain.state_dict())
    ids = torch.ones(1, 4, dtype=torch.long)
    assert torch.allclose(sharded(ids.to(this_device())).logits.cpu(), plain(ids).logits, atol=1e-5)
