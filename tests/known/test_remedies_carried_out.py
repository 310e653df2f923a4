"""The code of remedies, executed as the catalogue prints it on the state that it is for."""

from __future__ import annotations

import copy
import functools
import pathlib
import tempfile
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from support.broken_steps import Job, assert_same_steps, make_net, wrap_fsdp1, wrap_fsdp2
from support.ranks import Setting, of_all_ranks, on_ranks, this_device, this_rank, together
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp_doctor
from fsdp_doctor.case import offloading
from fsdp_doctor.known.catalogue import find_entry

on_the_device = on_ranks(Setting("emulated", 2))
on_cpu_ranks = on_ranks(Setting("cpu", 2))
_NAMES: dict[str, Any] = {
    "torch": torch,
    "nn": nn,
    "dist": dist,
    "dcp": dcp,
    "fsdp_doctor": fsdp_doctor,
    "safetensors": safetensors,
    "AdamW": torch.optim.AdamW,
    "CPUOffload": CPUOffload,
    "CPUOffloadPolicy": CPUOffloadPolicy,
    "DTensor": DTensor,
    "FullStateDictConfig": FullStateDictConfig,
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "OptimStateKeyType": OptimStateKeyType,
    "StateDictOptions": StateDictOptions,
    "StateDictType": StateDictType,
    "distribute_tensor": distribute_tensor,
    "fully_shard": fully_shard,
    "get_model_state_dict": get_model_state_dict,
    "get_optimizer_state_dict": get_optimizer_state_dict,
    "init_device_mesh": init_device_mesh,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "set_model_state_dict": set_model_state_dict,
    "set_optimizer_state_dict": set_optimizer_state_dict,
    # What verl calls its functions.
    "load_fsdp_model_to_gpu": lambda model: offloading.load(model, this_device(), non_blocking=False),
    "offload_fsdp_model_to_cpu": lambda model: offloading.offload(model, non_blocking=False),
}
_FULL = StateDictOptions(full_state_dict=True)
under_policy = functools.partial(wrap_fsdp2, offload_policy=CPUOffloadPolicy())
no_shard = functools.partial(wrap_fsdp1, sharding_strategy=ShardingStrategy.NO_SHARD)


def carry_out(entry: str, **names: Any) -> dict[str, Any]:
    """Executes the code of an entry's remedy, and returns the names that there are then."""
    scope = {**_NAMES, "device": this_device(), "rank": this_rank(), "device_type": this_device().type, **names}
    exec(find_entry(entry).code, scope)
    return scope


def read_whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in fsdp_doctor.full_tensors(model)}


def assert_equal(found: Any, right: dict[str, torch.Tensor], device: str = "") -> None:
    assert found.keys() == right.keys()
    for name, tensor in found.items():
        assert not device or tensor.device.type == device, name
        assert torch.equal(tensor.to(this_device()), right[name]), name


def take_after_optimizer_is_offloaded(job: Job, *, non_blocking: bool) -> None:
    for entries in job.optimizer.state.values():
        entries |= {key: value.to("cpu", non_blocking=non_blocking) for key, value in entries.items()}


@on_the_device
def test_a_model_on_meta_is_loaded_under_a_policy_on_the_cpu() -> None:
    twin = Job(under_policy, steps=0)
    full = {name: tensor.cpu() for name, tensor in read_whole(twin.model).items()}
    for entry in ("FD006", "FD127"):
        with torch.device("meta"):
            net = make_net()
        for module in (net[1], net[2], net):
            fully_shard(module, offload_policy=CPUOffloadPolicy())
        carry_out(entry, model=net, full=dict(full), offload_policy=CPUOffloadPolicy())
        if entry == "FD127":
            fsdp_doctor.load_full_tensors(net, full)
        job, twin = Job(lambda _: net, steps=0), Job(under_policy, steps=0)  # noqa: B023
        assert_same_steps(job, twin)


@on_the_device
def test_an_optimizer_with_kernels_of_the_cpu_steps_under_a_policy() -> None:
    for entry in ("FD008", "FD108"):
        job, twin = Job(under_policy, steps=0), Job(under_policy, steps=0)
        job.optimizer = carry_out(entry, model=job.model)["optimizer"]
        twin.optimizer = torch.optim.AdamW(twin.shards.values(), **{"lr": 1e-5} if entry == "FD008" else {})
        (loss, _), (right, _) = job.step(), twin.step()
        assert loss == right
        for name, tensor in read_whole(job.model).items():
            torch.testing.assert_close(tensor, read_whole(twin.model)[name])


def make_with_buffer() -> nn.Module:
    net = make_net()
    net.register_buffer("scale", torch.full((3,), 2.0))
    net.register_forward_pre_hook(lambda module, inputs: (inputs[0] * module.scale,))
    return net


@on_the_device
def test_buffers_are_on_the_cpu_during_loading_and_on_the_device_afterwards() -> None:
    twin = Job(under_policy, make=make_with_buffer)
    full = {name: tensor.cpu() for name, tensor in read_whole(twin.model).items()}
    job = Job(under_policy, make=make_with_buffer, steps=0)
    job.model.to("cpu")
    for buffer in job.model.buffers():
        buffer.data = buffer.data.to(this_device())
    carry_out("FD009", model=job.model, full=full)
    twin.make_optimizer()
    assert_same_steps(job, twin)


@on_the_device
def test_the_norm_of_gradients_on_the_host_is_reduced_on_the_device() -> None:
    own = DeviceMesh.from_group(dist.new_group(backend="emulated"), "emulated", mesh_dim_names=("device_only",))
    alone = Job(functools.partial(under_policy, mesh=own), steps=0)
    both = Job(under_policy, steps=0)
    for job in (alone, both):
        job.compute_loss().backward()
    parameters = list(alone.shards.values())
    carry_out("FD015", parameters=parameters, gradients=[shard.grad for shard in parameters], max_norm=0.1)
    torch.nn.utils.clip_grad_norm_(both.shards.values(), 0.1)
    for name, shard in alone.shards.items():
        torch.testing.assert_close(shard.grad.to_local(), both.shards[name].grad.to_local())  # type: ignore[union-attr]


@on_the_device
def test_a_device_is_that_of_the_mesh() -> None:
    mesh = init_device_mesh("emulated", (2,))
    assert carry_out("FD011", mesh=mesh)["device"] == this_device()


@on_the_device
def test_a_dtensor_is_made_from_its_part_with_the_true_shape() -> None:
    job = Job(wrap_fsdp2)
    right = read_whole(job.model)
    for name, parameter in job.shards.items():
        for entry in ("FD025", "FD026"):
            full = carry_out(entry, parameter=parameter, local=parameter.to_local())["full"]
            assert torch.equal(full, right[name]), name


@on_the_device
def test_a_save_in_the_background_has_the_tensors_of_its_call() -> None:
    job = Job(wrap_fsdp2)
    right = read_whole(job.model)
    for entry in ("FD024", "FD039"):
        with tempfile.TemporaryDirectory() as own:
            directory = of_all_ranks(own)[0]
            state = {name: tensor.cpu().clone() for name, tensor in job.model.state_dict().items()}
            scope: dict[str, Any] = {}

            def save(*arguments: Any, scope: dict[str, Any] = scope, **options: Any) -> None:
                scope["future"] = dcp.async_save(*arguments, **options)

            class Background:
                async_save = staticmethod(save)

            carry_out(entry, dcp=Background, state=state, directory=directory, model=job.model)
            if entry == "FD039":
                job.step()
            scope["future"].result()
            template = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in right.items()}
            dcp.load(template, checkpoint_id=directory)
            assert_equal(template, right)
            together()


def _read_back(directory: str, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    template = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in like.items()}
    dcp.load(template, checkpoint_id=directory)
    return template


@on_the_device
def test_a_stager_with_a_stream_copies_what_the_step_has_written() -> None:
    job = Job(wrap_fsdp2)
    names = {"stager": DefaultStager(StagingOptions()), "gloo": None}
    with tempfile.TemporaryDirectory() as own:
        directory = of_all_ranks(own)[0]
        with torch.emulated.race_detection():
            job.step()
            scope = carry_out("FD236", state=get_model_state_dict(job.model), directory=directory, **names)
            torch.emulated.synchronize()
            assert not torch.emulated.data_races()
        right = read_whole(job.model)
        job.step()
        scope["saving"].upload_completion.result()
        assert_equal(_read_back(directory, right), right)
        together()


@on_the_device
def test_a_save_that_waits_for_the_last_leaves_it_as_it_was() -> None:
    job = Job(wrap_fsdp2)
    names = {"stager": DefaultStager(StagingOptions(False, False, False, False)), "gloo": None}
    with tempfile.TemporaryDirectory() as own:
        directories = [f"{of_all_ranks(own)[0]}/{step}" for step in range(3)]
        rights, saving = [], None
        for directory in directories:
            rights.append(read_whole(job.model))
            state = get_model_state_dict(job.model)
            saving = carry_out("FD237", state=state, directory=directory, saving=saving, **names)["saving"]
            job.step()
        saving.result()
        for directory, right in zip(directories, rights, strict=True):
            assert_equal(_read_back(directory, right), right)
        together()


@on_the_device
def test_moments_are_read_after_a_synchronization() -> None:
    for wrap, entry in (
        (functools.partial(wrap_fsdp1, use_orig_params=True), "FD032"),
        (functools.partial(no_shard, use_orig_params=True), "FD033"),
    ):
        job = Job(wrap)
        right = get_optimizer_state_dict(job.model, job.optimizer)["state"]
        right = {name: {key: value.clone() for key, value in of.items()} for name, of in right.items()}
        torch.emulated.synchronize()
        take_after_optimizer_is_offloaded(job, non_blocking=True)
        state = carry_out(entry, model=job.model, optimizer=job.optimizer)["state"]["state"]
        for name, entries in right.items():
            for key, value in entries.items():
                own = state[name][key]
                own, value = (one.to_local() if hasattr(one, "to_local") else one for one in (own, value))
                if isinstance(own, torch.Tensor):
                    assert torch.equal(own.cpu(), value.cpu()), (name, key)


@on_the_device
def test_a_state_dict_that_lies_elsewhere_is_copied_where_it_is_wanted() -> None:
    original = functools.partial(no_shard, use_orig_params=True)
    job = Job(original, make=make_with_buffer)
    right = read_whole(job.model)
    state = carry_out("FD053", model=job.model, rank=this_rank())["state"]
    assert_equal(state, right if this_rank() == 0 else {}, "cpu")
    offloading.offload(job.model, non_blocking=False)
    assert_equal(carry_out("FD055", model=job.model)["state"], right, "emulated")
    sharded = Job(functools.partial(wrap_fsdp1, use_orig_params=True), make=make_with_buffer)
    with FullyShardedDataParallel.state_dict_type(
        sharded.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)
    ):
        state = sharded.model.state_dict()
    assert_equal(carry_out("FD056", state=state)["state"], read_whole(sharded.model), "cpu")


@on_the_device
def test_every_entry_is_brought_to_the_device() -> None:
    for entry in ("FD081", "FD082"):
        job = Job(wrap_fsdp2, make=make_with_buffer)
        right = read_whole(job.model)
        job.model.to("cpu")
        state = {name: carry_out(entry, tensor=tensor)["full"] for name, tensor in job.model.state_dict().items()}
        assert_equal(state, right, "emulated")


@on_the_device
def test_an_offload_that_blocks_loses_no_uneven_shard() -> None:
    for entry in ("FD030", "FD031", "FD148"):
        job, twin = Job(wrap_fsdp2), Job(wrap_fsdp2)
        carry_out(entry, model=job.model)
        job.model.to(this_device())
        assert_same_steps(job, twin)


@on_the_device
def test_a_load_waits_for_the_copies_of_an_offload() -> None:
    def make_even() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 4))

    job, twin = Job(wrap_fsdp2, make=make_even), Job(wrap_fsdp2, make=make_even)
    state = {name: tensor * 2 for name, tensor in read_whole(job.model).items()}
    torch.emulated.synchronize()
    carry_out("FD173", model=job.model, state=dict(state), options=_FULL)
    job.model.to(this_device())
    set_model_state_dict(twin.model, dict(state), options=_FULL)
    assert_same_steps(job, twin)


@on_the_device
def test_a_model_that_a_forward_left_unsharded_is_resharded_first() -> None:
    job, twin = Job(wrap_fsdp2), Job(wrap_fsdp2)
    right = read_whole(twin.model)
    state = {name: tensor * 2 for name, tensor in right.items()}
    with torch.no_grad():
        job.compute_loss()
    set_model_state_dict(twin.model, dict(state), options=_FULL)

    def load(model: nn.Module, given: Any) -> None:
        set_model_state_dict(model, given, options=_FULL)

    carry_out("FD045", model=job.model, state=dict(state), set_model_state_dict=load)
    assert_same_steps(job, twin)
    with torch.no_grad():
        job.compute_loss()
    carry_out("FD047", model=job.model)
    assert all(isinstance(parameter, DTensor) for parameter in job.model.parameters())


@on_the_device
def test_a_flat_parameter_is_resharded_before_it_is_offloaded() -> None:
    for original in (False, True):
        wrap = functools.partial(wrap_fsdp1, use_orig_params=original)
        job, twin = Job(wrap), Job(wrap)
        with torch.no_grad():
            job.compute_loss()
        for module in FullyShardedDataParallel.fsdp_modules(job.model):
            carry_out("FD061", model=module, offload_fsdp_model_to_cpu=lambda model: None)
        offloading.offload(job.model, non_blocking=False)
        offloading.load(job.model, this_device(), non_blocking=False)
        assert_same_steps(job, twin)


@on_the_device
def test_a_root_is_summoned_before_its_units() -> None:
    for original in (False, True):
        job = Job(functools.partial(wrap_fsdp1, use_orig_params=original), steps=0)
        twin = Job(functools.partial(wrap_fsdp1, use_orig_params=original), steps=0)
        carry_out("FD063", model=job.model)
        with FullyShardedDataParallel.summon_full_params(job.net[1]):  # type: ignore[index]
            pass
        assert_same_steps(job, twin)


@on_cpu_ranks
def test_a_full_state_dict_on_the_cpu_is_taken_without_its_offload() -> None:
    wrap = functools.partial(wrap_fsdp1, use_orig_params=True)
    job = Job(wrap)
    right = read_whole(job.model)
    config = eval(find_entry("FD051").code, {**_NAMES, "device": torch.device("cpu")})
    with FullyShardedDataParallel.state_dict_type(job.model, StateDictType.FULL_STATE_DICT, config):
        state = job.model.state_dict()
    assert_equal(state, right if this_rank() == 0 else {}, "cpu")


@on_the_device
def test_safetensors_are_given_whole_tensors() -> None:
    job = Job(wrap_fsdp2)
    with tempfile.TemporaryDirectory() as own:
        path = pathlib.Path(of_all_ranks(own)[0]) / "model.safetensors"
        carry_out("FD080", model=job.model, path=path)
        together()
        assert_equal(safetensors.torch.load_file(path), read_whole(job.model))
        together()


@on_the_device
def test_another_method_than_forward_is_registered() -> None:
    class Generating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(3, 3)
            self.lm_head = nn.Linear(3, 3)

        def generate(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.model(hidden))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Generating().to(this_device())
    hidden = torch.ones(2, 3, device=this_device())
    right = net.generate(hidden)
    whole = net.lm_head.weight.detach().clone()
    model = fully_shard(net)
    with pytest.raises(RuntimeError, match="mixed"):
        model.generate(hidden)  # type: ignore[attr-defined]
    assert torch.equal(carry_out("FD096", model=model)["weight"], whole)
    assert torch.equal(model.generate(hidden), right)  # type: ignore[attr-defined]


@on_the_device
def test_the_root_is_wrapped_too_before_an_optimizer_steps() -> None:
    def wrap_units(net: Any) -> nn.Module:
        net.to(this_device())
        for name in ("1", "2"):
            fully_shard(net.get_submodule(name))
        return net  # type: ignore[no-any-return]

    job, twin = Job(wrap_units, steps=0), Job(wrap_fsdp2)
    # torch hands out the counters that the optimizer goes on with.
    state = copy.deepcopy(get_optimizer_state_dict(twin.model, twin.optimizer, options=_FULL))

    def load(model: nn.Module, optimizer: Any, given: Any) -> None:
        set_optimizer_state_dict(model, job.optimizer, given, options=_FULL)

    def shard(net: Any) -> nn.Module:
        model = fully_shard(net)
        job.model = model
        job.make_optimizer()
        return model

    carry_out("FD099", model=job.model, optimizer=None, state=state, set_optimizer_state_dict=load, fully_shard=shard)
    fsdp_doctor.load_full_tensors(job.model, read_whole(twin.model))
    assert_same_steps(job, twin)


@on_the_device
def test_a_model_is_cast_before_it_is_sharded() -> None:
    net = make_net().bfloat16()
    net[0].float()
    carry_out("FD102", model=net)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    Job(lambda one: wrap_fsdp2(one, mp_policy=policy), make=lambda: net)
    net = make_net().bfloat16()
    net[1].up.float()  # type: ignore[union-attr]
    carry_out("FD073", model=net)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}
    net = make_net().bfloat16()
    carry_out("FD150", model=net)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


@on_the_device
def test_a_shared_parameter_is_sharded_in_one_group() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.norm, self.model.embed_tokens = nn.LayerNorm(3), nn.Linear(3, 3, bias=False)
            self.lm_head = nn.Linear(3, 3, bias=False)
            self.lm_head.weight = self.model.embed_tokens.weight

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.model.norm(self.model.embed_tokens(hidden)))  # type: ignore[no-any-return, operator]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Tied()

    def wrap_group(net: nn.Module) -> nn.Module:
        carry_out("FD151", model=net.to(this_device()))
        return fully_shard(net)

    assert_same_steps(Job(wrap_group, make=make), Job(lambda net: fully_shard(net.to(this_device())), make=make))


@on_the_device
def test_a_tensor_is_distributed_as_its_parameter_is() -> None:
    job = Job(wrap_fsdp2, make=make_with_buffer)
    right = read_whole(job.model)
    for name, own in job.model.state_dict().items():
        value = carry_out("FD140", own=own, full=right[name])["value"]
        local, expected = (one.to_local() if isinstance(one, DTensor) else one for one in (value, own))
        assert torch.equal(local, expected), name


@on_the_device
def test_mismatched_names_are_found_on_every_rank_before_a_load() -> None:
    job = Job(wrap_fsdp2)
    full = read_whole(job.model)
    lacking = {name: tensor for name, tensor in full.items() if name != "3.bias"}
    for entry, wrong in (("FD132", lacking), ("FD139", lacking), ("FD141", {**full, "extra": full["3.bias"]})):
        carry_out(entry, model=job.model, full=full)
        with pytest.raises(AssertionError, match=r"3\.bias|extra"):
            carry_out(entry, model=job.model, full=wrong)
    carry_out("FD139", model=_Headed(), full={})


class _Headed(nn.Module):
    """A model of which the remedy's example may be missing."""

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {"lm_head.weight": torch.zeros(1)}


@on_the_device
def test_the_dtype_of_a_broadcast_is_what_the_others_allocated() -> None:
    own = torch.zeros(4, dtype=torch.bfloat16, device=this_device())
    state = {"weight": torch.arange(4, dtype=torch.float32)}
    for entry in ("FD142", "FD143", "FD144"):
        lines = [line for line in find_entry(entry).code.splitlines() if line.strip()]
        scope = {**_NAMES, "device": this_device(), "own": own, "name": "weight", "state": state}
        # The first line is for rank 0, and the next for the others.
        exec(lines[0 if this_rank() == 0 else -1], scope)
        full: torch.Tensor = scope["full"]
        dist.broadcast(full, src=0)
        assert torch.equal(full.float().cpu(), state["weight"]), entry


@on_the_device
def test_options_of_a_run_are_set_after_the_load() -> None:
    saved, job = Job(wrap_fsdp2), Job(wrap_fsdp2, steps=0)
    state = get_optimizer_state_dict(saved.model, saved.optimizer, options=_FULL)
    for group in job.optimizer.param_groups:
        group["lr"] = 0.5
    carry_out("FD172", model=job.model, optimizer=job.optimizer, state=state, options=_FULL)
    assert {group["lr"] for group in job.optimizer.param_groups} == {0.5}
    for shard, of in job.optimizer.state.items():
        name = next(name for name, one in job.shards.items() if one is shard)
        assert torch.equal(of["exp_avg"].to_local(), saved.optimizer.state[saved.shards[name]]["exp_avg"].to_local())


@on_the_device
def test_a_part_of_an_optimizers_state_is_loaded_where_it_is_allowed() -> None:
    for entry in ("FD106", "FD161"):
        job, saved = Job(wrap_fsdp2, steps=0), Job(wrap_fsdp2)
        state = get_optimizer_state_dict(saved.model, saved.optimizer)
        del state["state"]["3.bias"]
        carry_out(entry, model=job.model, optimizer=job.optimizer, state=state)
        held = job.optimizer.state[job.shards["3.weight"]]["exp_avg"].to_local()
        assert torch.equal(held, saved.optimizer.state[saved.shards["3.weight"]]["exp_avg"].to_local())


@on_the_device
def test_names_of_wrappers_are_taken_out_of_a_checkpoint() -> None:
    job, twin = Job(wrap_fsdp2, steps=0), Job(wrap_fsdp2)
    state = {f"_orig_mod.{name}": tensor for name, tensor in read_whole(twin.model).items()}
    carry_out("FD187", model=job.model, state=state)
    twin.make_optimizer()
    assert_same_steps(job, twin)


@on_the_device
def test_gradients_are_added_up_under_a_policy_of_fsdp2() -> None:
    def wrap_all(net: Any) -> nn.Module:
        for module in (net[1], net[2], net):
            carry_out("FD042", module=module)
        for buffer in net.buffers():
            buffer.data = buffer.data.to(this_device())
        return net  # type: ignore[no-any-return]

    job, twin = Job(wrap_all, steps=0), Job(wrap_fsdp2, steps=0)
    for one in (job, twin):
        one.compute_loss(1).backward()
        one.compute_loss(2).backward()
    for name, shard in job.shards.items():
        assert torch.equal(shard.grad.to_local(), twin.shards[name].grad.to_local().cpu()), name  # type: ignore[union-attr]


@on_the_device
def test_a_policy_is_given_to_every_unit() -> None:
    def wrap_layers(net: Any) -> nn.Module:
        vars(net)["layers"] = [net[1], net[2]]
        carry_out("FD190", model=net)
        return net  # type: ignore[no-any-return]

    assert_same_steps(Job(wrap_layers, steps=0), Job(under_policy, steps=0))


@on_the_device
def test_an_adapter_beside_frozen_weights_trains_with_the_original_parameters() -> None:
    def make() -> nn.Module:
        net = make_net()
        net[0].requires_grad_(False)
        return net.to(this_device())

    for entry in ("FD074", "FD181"):
        job = Job(lambda net: FullyShardedDataParallel(net, device_id=this_device(), use_orig_params=True), make=make)
        wrapped = eval(find_entry(entry).code, {**_NAMES, "model": make()})
        other = Job(lambda _: wrapped, make=make)  # noqa: B023
        assert_same_steps(other, job)


@on_the_device
def test_sharded_state_of_fsdp1_with_a_mesh_is_of_dtensors() -> None:
    model = carry_out("FD079", model=make_net().to(this_device()))["model"]
    carry_out("FD065", model=model)
    assert all(isinstance(tensor, DTensor) for tensor in model.state_dict().values())


@on_the_device
def test_whatever_uses_the_parameters_of_fsdp1_runs_while_they_are_summoned() -> None:
    class Generating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.linear(hidden)  # type: ignore[no-any-return]

        def generate(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.linear(self.linear(hidden))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net = Generating().to(this_device())
    hidden = torch.ones(2, 3, device=this_device())
    right = net.generate(hidden)
    model = FullyShardedDataParallel(net, device_id=this_device(), use_orig_params=True)
    for entry in ("FD071", "FD072"):
        assert torch.equal(carry_out(entry, model=model, inputs={"hidden": hidden})["output"], right)


@on_the_device
def test_buffers_are_kept_and_written_after_to_empty() -> None:
    def make() -> nn.Module:
        net = make_with_buffer()
        net.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        return net

    job, twin = Job(wrap_fsdp2, make=make), Job(wrap_fsdp2, make=make)
    carry_out("FD124", model=job.model)
    fsdp_doctor.load_full_tensors(job.model, read_whole(twin.model))
    assert_same_steps(job, twin)


@on_the_device
def test_buffers_are_broadcast_in_the_order_of_their_names() -> None:
    names = ["scale", "bias"] if this_rank() == 0 else ["bias", "scale"]
    buffers = {name: torch.full((len(name),), float(this_rank()), device=this_device()) for name in names}
    carry_out("FD022", buffers=buffers)
    assert not any(buffer.any() for buffer in buffers.values())


@on_the_device
def test_what_every_rank_saves_or_reads_is_its_own() -> None:
    assert set(carry_out("FD169")["state"]) == {f"rng.{this_rank()}"}
    with tempfile.TemporaryDirectory() as own:
        file = pathlib.Path(of_all_ranks(own)[0]) / "state.pt"
        job = Job(wrap_fsdp1)
        weights = read_whole(job.model)
        if this_rank() == 0:
            torch.save(weights, file)
            torch.save({"model": job.before}, file.with_name("nested.pt"))
        together()
        for tensor in carry_out("FD155", file=file)["state"].values():
            assert tensor.is_cpu
        assert set(carry_out("FD171", file=file)["state"]) == (set(weights) if this_rank() == 0 else set())
        assert set(carry_out("FD188", path=file.with_name("nested.pt"))["state"]) == set(weights)
        for entry in ("FD176", "FD178"):
            carry_out(entry, optimizer=job.optimizer, directory=own)
            saved = torch.load(f"{own}/optimizer_rank{this_rank()}.pt", map_location="cpu", weights_only=False)
            again = Job(wrap_fsdp1)
            again.optimizer.load_state_dict(saved)
            assert_same_steps(again, Job(wrap_fsdp1))
        together()


@on_the_device
def test_sharded_moments_are_saved_and_loaded() -> None:
    for entry in ("FD107", "FD185"):
        for wrap in (wrap_fsdp2, functools.partial(wrap_fsdp1, use_orig_params=True)):
            saved, job = Job(wrap), Job(wrap, steps=0)
            with tempfile.TemporaryDirectory() as own:
                directory = of_all_ranks(own)[0]
                carry_out(entry, model=saved.model, optimizer=saved.optimizer, directory=directory)
                template = {"optimizer": get_optimizer_state_dict(job.model, job.optimizer)}
                dcp.load(template, checkpoint_id=directory)
                carry_out("FD186", model=job.model, optimizer=job.optimizer, state=template["optimizer"])
                together()
            fsdp_doctor.load_full_tensors(job.model, read_whole(saved.model))
            assert_same_steps(job, saved)


@on_the_device
def test_optimizer_state_of_other_names_is_rekeyed() -> None:
    wrap = functools.partial(wrap_fsdp1, use_orig_params=True)
    saved, job = Job(wrap), Job(wrap, steps=0)
    state = FullyShardedDataParallel.full_optim_state_dict(saved.model, saved.optimizer, rank0_only=False)
    by_number = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, saved.model)
    scope = carry_out("FD184", model=job.model, optimizer=job.optimizer, state=by_number)
    job.optimizer.load_state_dict(scope["state"])
    fsdp_doctor.load_full_tensors(job.model, read_whole(saved.model))
    assert_same_steps(job, saved)


@on_the_device
def test_an_optimizer_is_made_of_what_trains_in_the_wrapped_model() -> None:
    def make() -> nn.Module:
        net = make_net()
        net[0].requires_grad_(False)
        return net.to(this_device())

    scope = carry_out("FD182", model=make())
    scope["model"](torch.ones(2, 3, device=this_device())).sum().backward()
    scope["optimizer"].step()
    state = get_optimizer_state_dict(scope["model"], scope["optimizer"], options=_FULL)
    assert not any(name.startswith("0.") for name in state["state"])
    set_optimizer_state_dict(scope["model"], scope["optimizer"], state, options=_FULL)


@on_the_device
def test_masters_follow_the_weights_that_were_loaded() -> None:
    job = Job(wrap_fsdp2)
    masters = [parameter.detach().clone() for parameter in job.model.parameters()]
    fsdp_doctor.load_full_tensors(job.model, {name: 2 * tensor for name, tensor in read_whole(job.model).items()})
    with torch.no_grad():
        carry_out("FD158", masters=masters, parameters=list(job.model.parameters()))
    for master, parameter in zip(masters, job.model.parameters(), strict=True):
        assert torch.equal(master.to_local(), parameter.to_local())  # type: ignore[attr-defined]
    carry_out("FD160", optimizer=job.optimizer, saved_step=2)
    with pytest.raises(AssertionError):
        carry_out("FD160", optimizer=job.optimizer, saved_step=1)


@on_the_device
def test_fsdp1_is_summoned_for_reading_and_its_state_dict_is_the_roots() -> None:
    job, twin = Job(functools.partial(wrap_fsdp1, use_orig_params=True)), None
    right = read_whole(job.model)
    assert_equal(carry_out("FD062", fsdp_root=job.model)["state"], right)
    carry_out("FD067", model=job.model)
    assert_equal(read_whole(job.model), right)
    twin = Job(functools.partial(wrap_fsdp1, use_orig_params=True))
    assert_same_steps(job, twin)


@on_the_device
def test_shards_are_brought_to_the_device_for_a_load() -> None:
    mesh = init_device_mesh("emulated", (2,))
    wrap = functools.partial(wrap_fsdp1, use_orig_params=True, device_mesh=mesh)
    saved, job = Job(wrap), Job(wrap, steps=0)
    state = {name: tensor.to("cpu") for name, tensor in get_model_state_dict(saved.model).items()}
    carry_out("FD068", model=job.model, state=state)
    saved.make_optimizer()
    assert_same_steps(job, saved)


@on_the_device
def test_layers_are_checkpointed_before_they_are_sharded() -> None:
    def wrap(net: Any) -> nn.Module:
        net.to(this_device())
        vars(net)["layers"] = [net[1], net[2]]
        kind = type(net[1])
        carry_out("FD098", model=net, Block=kind, apply_activation_checkpointing=apply_activation_checkpointing)
        return net  # type: ignore[no-any-return]

    job, twin = Job(wrap, steps=0), Job(wrap_fsdp2, steps=0)
    for seed in range(2):
        (loss, found), (right_loss, right) = job.step(seed), twin.step(seed)
        assert loss == right_loss
        for name, gradient in found.items():
            assert torch.equal(gradient, right[name.replace("_checkpoint_wrapped_module.", "")]), name
