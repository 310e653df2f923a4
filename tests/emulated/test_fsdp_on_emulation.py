"""FSDP2 and FSDP1 on the emulated device train, save and load as one process does on the CPU.

PyTorch's own tests of FSDP run on the device by ``python -m tests.emulated.pytorch_suite``, from a checkout of it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.ranks import Setting, accelerator, on_ranks, this_device, this_rank, together, world_size
from support.training import (
    EVEN,
    STEPS,
    UNEVEN,
    Dims,
    Tensors,
    adamw,
    all_ranks,
    allocated_bytes,
    assert_all,
    assert_close,
    assert_close_losses,
    assert_same,
    backward,
    check_training,
    fsdp2_of,
    gradient_shards_of,
    gradients_on_cpu,
    local_of,
    mesh_of_all,
    new_net,
    on_the_device,
    other_net,
    parts_of,
    shards_of,
    shared_directory,
    tokens_of,
    train,
    trained_on_cpu,
    weights_of,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import Shard

# FSDP2


@on_the_device
def test_fsdp2_trains_as_one_process_does() -> None:
    check_training(fsdp2_of(new_net(), reshard_after_forward=True))
    check_training(fsdp2_of(new_net(checkpointed=True), reshard_after_forward=False))
    check_training(fsdp2_of(new_net(UNEVEN)), UNEVEN)
    for pinned in (True, False):
        check_training(fsdp2_of(new_net(UNEVEN), offload_policy=CPUOffloadPolicy(pin_memory=pinned)), UNEVEN)
    prefetching = fsdp2_of(new_net())
    for unit, following in itertools.pairwise(prefetching.blocks):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    check_training(prefetching)


@on_the_device
def test_fsdp2_keeps_offloaded_shards_and_gradients_on_the_cpu_pinned_if_configured() -> None:
    for pinned in (True, False):
        model = fsdp2_of(new_net(), offload_policy=CPUOffloadPolicy(pin_memory=pinned))
        backward(model, 0, [this_rank()], this_device())
        shards = [*shards_of(model).values(), *gradient_shards_of(model).values()]
        assert {shard.device.type for shard in shards} == {"cpu"}
        assert {shard.is_pinned() for shard in shards_of(model).values()} == {pinned}


@on_the_device
def test_fsdp2_gradients_are_those_of_one_process() -> None:
    """Gradients of two ranks are equal to the last bit: their sum has one order only, and halves are exact."""
    for dims in (EVEN, UNEVEN):
        model = fsdp2_of(new_net(dims))
        backward(model, 0, [this_rank()], this_device(), dims.vocabulary)
        compare = assert_same if world_size() == 2 else assert_close
        assert_all(compare, gradient_shards_of(model), parts_of(gradients_on_cpu(dims)))
    divided = fsdp2_of(new_net())
    for unit in (*divided.blocks, divided):
        # A reduction with PREMUL_SUM inside.
        unit.set_gradient_divide_factor(4 * world_size())
    backward(divided, 0, [this_rank()], this_device())
    expected = {name: gradient / 4 for name, gradient in gradients_on_cpu().items()}
    assert_all(functools.partial(assert_close, atol=1e-6), gradient_shards_of(divided), parts_of(expected))


@on_the_device
def test_fsdp2_unshards_by_hand_to_whole_parameters_and_frees_their_memory_again() -> None:
    model = fsdp2_of(new_net(UNEVEN))
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    expected = weights_of(new_net(UNEVEN))
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    before, unsharded, resharded = allocated_bytes(), [], []
    for async_op in (False, True):
        handles = [unit.unshard(async_op=async_op) for unit in units]
        if async_op:
            for handle in handles:
                handle.wait()
        assert_all(assert_same, weights_of(model), expected)
        unsharded.append(allocated_bytes())
        for unit in units:
            unit.reshard()
        handles.clear()
        resharded.append(allocated_bytes())
    assert min(unsharded) >= before + nbytes
    assert resharded == [before, before]
    assert_all(assert_same, shards_of(model), parts_of(expected))


@on_the_device
def test_fsdp2_uses_no_more_memory_after_many_steps_than_after_one() -> None:
    allocated: dict[str, list[int]] = {}
    for name, policy in (("device", OffloadPolicy()), ("cpu", CPUOffloadPolicy())):
        model = fsdp2_of(new_net(), offload_policy=policy)
        optimizer = adamw(model)
        for step in range(4):
            train(model, optimizer, steps=[step])
            allocated.setdefault(name, []).append(allocated_bytes())
    assert [len(set(after_each[1:])) for after_each in allocated.values()] == [1, 1], allocated


@on_the_device
def test_fsdp2_holds_fewer_parameters_at_a_time_where_it_reshards_after_forward() -> None:
    peaks = {}
    for reshards in (True, False):
        model = fsdp2_of(new_net(Dims(vocabulary=6, width=120, hidden=240)), reshard_after_forward=reshards)
        before = allocated_bytes()
        accelerator().reset_peak_memory_stats()
        with torch.no_grad():
            model(tokens_of(0, 0, 6).to(this_device()))
        peaks[reshards] = accelerator().max_memory_allocated() - before
    assert peaks[True] < 0.8 * peaks[False], peaks


@on_the_device
def test_fsdp2_moves_to_the_cpu_and_back_by_hand_and_trains_on() -> None:
    for non_blocking in (True, False):
        model = fsdp2_of(new_net())
        optimizer = adamw(model)
        train(model, optimizer, steps=[0])
        model.to("cpu", non_blocking=non_blocking)
        assert {shard.device.type for shard in shards_of(model).values()} == {"cpu"}
        model.to(this_device(), non_blocking=non_blocking)
        train(model, optimizer, steps=range(1, STEPS))
        assert_all(assert_close, shards_of(model), parts_of(trained_on_cpu()[0]))


def _losses_of_offloaded_training() -> list[float]:
    """Shards and gradients are copied while tensors come and go on several streams."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    policies = {"offload_policy": CPUOffloadPolicy(), "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for module in (model[0], model[1], model[3], model):
        fully_shard(module, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.arange(8, device=this_device())).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(Setting("emulated", 2))
def test_offloaded_training_has_no_race_and_does_not_use_freed_memory() -> None:
    plain = _losses_of_offloaded_training()
    accelerator().poison_freed_memory()
    with contextlib.ExitStack() as stack:
        stack.callback(accelerator().poison_freed_memory, False)
        assert _losses_of_offloaded_training() == plain
    with accelerator().race_detection():
        assert _losses_of_offloaded_training() == plain
    together()


# FSDP2's state dicts and checkpoints


@on_the_device
def test_state_dicts_hold_the_shards_or_the_parameters_before_sharding() -> None:
    whole = weights_of(new_net(UNEVEN))
    for offload in ({}, {"offload_policy": CPUOffloadPolicy()}):
        model = fsdp2_of(new_net(UNEVEN), **offload)
        state = model.state_dict()
        assert {value.placements for value in state.values()} == {(Shard(0),)}
        assert_all(assert_same, {name: value.to_local() for name, value in state.items()}, parts_of(whole))
        assert_all(assert_same, {name: value.full_tensor() for name, value in state.items()}, whole)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert_all(assert_same, full, whole)
    model = fsdp2_of(new_net(UNEVEN))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert {tensor.device.type for tensor in full.values()} <= {"cpu"}
    assert_all(assert_same, full, whole if this_rank() == 0 else {})
    sharded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert {tensor.device.type for tensor in sharded.values()} == {"cpu"}
    assert_all(assert_same, {name: local_of(tensor) for name, tensor in sharded.items()}, parts_of(whole))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


@on_the_device
def test_training_resumes_from_a_distributed_checkpoint_as_if_it_had_not_stopped() -> None:
    def save(state: dict[str, Any], directory: str) -> None:
        dcp.save(state, checkpoint_id=directory)

    def save_in_background(state: dict[str, Any], directory: str) -> None:
        dcp.async_save(state, checkpoint_id=directory).result()

    _check_checkpoint(save)
    _check_checkpoint(save, offload_policy=CPUOffloadPolicy())
    _check_checkpoint(save_in_background)


def _check_checkpoint(save: Callable[[dict[str, Any], str], None], **sharding: Any) -> None:
    first, second = fsdp2_of(new_net(UNEVEN), **sharding), fsdp2_of(other_net(UNEVEN), **sharding)
    optimizer, another = adamw(first), adamw(second)
    train(first, optimizer, steps=[0], vocabulary=UNEVEN.vocabulary)
    with shared_directory() as directory:
        save(_state(first, optimizer), directory)
        state = _state(second, another)
        dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(second, state["model"])
    set_optimizer_state_dict(second, another, state["optimizer"])
    assert_all(assert_same, shards_of(second), {name: shard.cpu() for name, shard in shards_of(first).items()})
    train(second, another, steps=range(1, STEPS), vocabulary=UNEVEN.vocabulary)
    assert_all(assert_close, shards_of(second), parts_of(trained_on_cpu(UNEVEN)[0]))


# FSDP1


def _fsdp1(net: nn.Module, **options: Any) -> FullyShardedDataParallel:
    options = {"device_id": this_device(), "use_orig_params": False, **options}
    for index, block in enumerate(net.blocks):
        net.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(net, **options)


def _unwrapped(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def _summoned(model: FullyShardedDataParallel, **options: bool) -> Tensors:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, **options):
        return {_unwrapped(name): tensor for name, tensor in weights_of(model).items()}


@on_the_device
def test_fsdp1_trains_as_one_process_does() -> None:
    for use_orig_params in (False, True):
        for options in (
            {},
            {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
            {"sharding_strategy": ShardingStrategy.NO_SHARD},
            {"cpu_offload": CPUOffload(offload_params=True)},
        ):
            model = _fsdp1(new_net(UNEVEN), use_orig_params=use_orig_params, **options)
            losses = train(model, adamw(model), vocabulary=UNEVEN.vocabulary)
            assert_close_losses(losses, trained_on_cpu(UNEVEN)[1])
            assert_all(assert_close, _summoned(model), trained_on_cpu(UNEVEN)[0])
            if "cpu_offload" in options:
                assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@on_the_device
def test_summon_full_params_writes_back_and_frees_its_memory() -> None:
    model = _fsdp1(new_net(), use_orig_params=True)
    before = allocated_bytes()
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert allocated_bytes() == before
    doubled = {name: 2 * tensor for name, tensor in weights_of(new_net()).items()}
    assert_all(assert_same, _summoned(model), doubled)
    on_rank_0 = _summoned(model, offload_to_cpu=True, rank0_only=True)
    if this_rank() == 0:
        assert {tensor.device.type for tensor in on_rank_0.values()} == {"cpu"}
        assert_all(assert_same, on_rank_0, doubled)


def _fsdp1_state(model: nn.Module, kind: StateDictType, config: Any = None) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, kind, config):
        return model.state_dict()


def _load_fsdp1(model: nn.Module, kind: StateDictType, state: dict[str, Any], config: Any = None) -> None:
    with FullyShardedDataParallel.state_dict_type(model, kind, config):
        model.load_state_dict(state)


@on_the_device
def test_an_fsdp1_full_state_dict_holds_whole_tensors() -> None:
    for use_orig_params in (False, True):
        model = _fsdp1(new_net(UNEVEN), use_orig_params=use_orig_params)
        assert_all(assert_same, _fsdp1_state(model, StateDictType.FULL_STATE_DICT), weights_of(new_net(UNEVEN)))
        on_rank_0 = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        state = _fsdp1_state(model, StateDictType.FULL_STATE_DICT, on_rank_0)
        assert {tensor.device.type for tensor in state.values()} <= {"cpu"}
        assert_all(assert_same, state, weights_of(new_net(UNEVEN)) if this_rank() == 0 else {})


@on_the_device
def test_fsdp1_sharded_and_local_state_dicts_load_directly_and_from_a_checkpoint() -> None:
    sharded, whole = StateDictType.SHARDED_STATE_DICT, weights_of(new_net(UNEVEN))
    for offload in (True, False):
        config = ShardedStateDictConfig(offload_to_cpu=offload)
        model, other = (_fsdp1(net, device_mesh=mesh_of_all()) for net in (new_net(UNEVEN), other_net(UNEVEN)))
        state = _fsdp1_state(model, sharded, config)
        locals_ = {name: value.to_local() for name, value in state.items()}
        assert {value.device.type for value in locals_.values()} == {"cpu" if offload else "emulated"}
        assert_all(assert_same, locals_, parts_of(whole))
        _load_fsdp1(other, sharded, state, config)
        assert_all(assert_same, _summoned(other), whole)
    model, other = _fsdp1(new_net(UNEVEN)), _fsdp1(other_net(UNEVEN))
    state = _fsdp1_state(other, sharded)
    with shared_directory() as directory:
        dcp.save(_fsdp1_state(model, sharded), checkpoint_id=directory)
        dcp.load(state, checkpoint_id=directory)
    _load_fsdp1(other, sharded, state)
    assert_all(assert_same, _summoned(other), whole)
    other = _fsdp1(other_net(UNEVEN))
    _load_fsdp1(other, StateDictType.LOCAL_STATE_DICT, _fsdp1_state(model, StateDictType.LOCAL_STATE_DICT))
    assert_all(assert_same, _summoned(other), whole)


@on_the_device
def test_fsdp1_offloaded_by_hand_frees_its_shards_and_trains_on() -> None:
    from fsdp_doctor.case import offloading
    from fsdp_doctor.weights.fsdp import reader

    def blocks(tensor: torch.Tensor) -> int:
        """Returns what the device counts for a tensor."""
        return -(-tensor.nbytes // 512) * 512

    freed, shards = [], []
    for use_orig_params, non_blocking in itertools.product((True, False), (True, False)):
        model = _fsdp1(new_net(), use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, steps=[0])
        shards.append(sum(blocks(unit.shard) for unit in reader.read(model).fsdp1_units))
        before = allocated_bytes()
        offloading.offload(model, non_blocking=non_blocking)
        freed.append(before - allocated_bytes())
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        offloading.load(model, this_device(), non_blocking=non_blocking)
        train(model, optimizer, steps=range(1, STEPS))
        assert_all(assert_close, _summoned(model), _trained_with_sgd())
    assert freed == shards


@functools.cache
def _trained_with_sgd() -> Tensors:
    net = new_net()
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), ranks=all_ranks())
    return weights_of(net)
