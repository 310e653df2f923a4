"""FSDP1 and DDP on the emulated device, and adapters under FSDP2."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.ranks import this_device, this_rank
from support.training import (
    STEPS,
    UNEVEN,
    Tensors,
    adamw,
    all_ranks,
    allocated_bytes,
    assert_all,
    assert_close,
    assert_close_losses,
    assert_same,
    backward,
    gradient_shards_of,
    gradients_on_cpu,
    mesh_of_all,
    new_net,
    on_the_device,
    other_net,
    parts_of,
    shards_of,
    shared_directory,
    train,
    trained_on_cpu,
    weights_of,
)
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def _fsdp1(net: nn.Module, **options: Any) -> FullyShardedDataParallel:
    options = {"device_id": this_device(), "use_orig_params": False, **options}
    for index, block in enumerate(net.blocks):
        net.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(net, **options)


def _unwrapped(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def _summoned(model: FullyShardedDataParallel) -> Tensors:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {_unwrapped(name): tensor for name, tensor in weights_of(model).items()}


def _check_fsdp1_training(**options: Any) -> None:
    for use_orig_params in (False, True):
        model = _fsdp1(new_net(UNEVEN), use_orig_params=use_orig_params, **options)
        losses = train(model, adamw(model), vocabulary=UNEVEN.vocabulary)
        assert_close_losses(losses, trained_on_cpu(UNEVEN)[1])
        assert_all(assert_close, _summoned(model), trained_on_cpu(UNEVEN)[0])


@on_the_device
def test_fsdp1_trains_as_one_process_does() -> None:
    _check_fsdp1_training()


@on_the_device
def test_fsdp1_that_shards_gradients_only_trains_as_one_process_does() -> None:
    _check_fsdp1_training(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


@on_the_device
def test_fsdp1_without_sharding_trains_as_one_process_does() -> None:
    _check_fsdp1_training(sharding_strategy=ShardingStrategy.NO_SHARD)


@on_the_device
def test_fsdp1_with_cpu_offload_trains_as_one_process_does() -> None:
    _check_fsdp1_training(cpu_offload=CPUOffload(offload_params=True))


@on_the_device
def test_fsdp1_keeps_offloaded_parameters_and_gradients_on_the_cpu() -> None:
    model = _fsdp1(new_net(), cpu_offload=CPUOffload(offload_params=True))
    backward(model, 0, [this_rank()], this_device())
    tensors = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


@on_the_device
def test_fsdp1_clips_by_the_norm_of_the_whole_gradient() -> None:
    expected = torch.stack([gradient.norm() for gradient in gradients_on_cpu(UNEVEN).values()]).norm()
    for use_orig_params in (False, True):
        model = _fsdp1(new_net(UNEVEN), use_orig_params=use_orig_params)
        backward(model, 0, [this_rank()], this_device(), UNEVEN.vocabulary)
        assert_close(model.clip_grad_norm_(0.5), expected, atol=0)


@on_the_device
def test_fsdp1_accumulates_without_communication_in_no_sync() -> None:
    model = _fsdp1(new_net(), use_orig_params=True)
    with model.no_sync():
        for step in range(2):
            backward(model, step, [this_rank()], this_device())
    backward(model, 2, [this_rank()], this_device())
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        gradients = {_unwrapped(name): p.grad.clone() for name, p in model.named_parameters()}
    assert_all(assert_close, gradients, gradients_on_cpu(steps=3))


@on_the_device
def test_summon_full_params_writes_back_and_frees_its_memory() -> None:
    model = _fsdp1(new_net(), use_orig_params=True)
    before = allocated_bytes()
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    after = allocated_bytes()
    assert_all(assert_same, _summoned(model), {name: 2 * tensor for name, tensor in weights_of(new_net()).items()})
    assert after == before


@on_the_device
def test_summon_full_params_gives_cpu_tensors_to_rank_0_if_told_so() -> None:
    model = _fsdp1(new_net(UNEVEN), use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, offload_to_cpu=True, rank0_only=True):
        parameters = {_unwrapped(name): tensor for name, tensor in weights_of(model).items()}
    if this_rank() == 0:
        assert {tensor.device.type for tensor in parameters.values()} == {"cpu"}
        assert_all(assert_same, parameters, weights_of(new_net(UNEVEN)))


def _fsdp1_state(model: nn.Module, kind: StateDictType, config: Any = None) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, kind, config):
        return model.state_dict()


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
def test_an_fsdp1_sharded_state_dict_holds_dtensors_and_loads() -> None:
    for offload in (True, False):
        model = _fsdp1(new_net(UNEVEN), device_mesh=mesh_of_all())
        config = ShardedStateDictConfig(offload_to_cpu=offload)
        state = _fsdp1_state(model, StateDictType.SHARDED_STATE_DICT, config)
        assert {type(value) for value in state.values()} == {DTensor}
        assert {value.to_local().device.type for value in state.values()} == {"cpu" if offload else "emulated"}
        assert_all(
            assert_same,
            {name: value.to_local() for name, value in state.items()},
            parts_of(weights_of(new_net(UNEVEN))),
        )
        other = _fsdp1(other_net(UNEVEN), device_mesh=mesh_of_all())
        with FullyShardedDataParallel.state_dict_type(other, StateDictType.SHARDED_STATE_DICT, config):
            other.load_state_dict(state)
        assert_all(assert_same, _summoned(other), weights_of(new_net(UNEVEN)))


@on_the_device
def test_an_fsdp1_sharded_state_dict_without_a_mesh_is_saved_and_loaded_by_dcp() -> None:
    model, other = _fsdp1(new_net(UNEVEN)), _fsdp1(other_net(UNEVEN))
    state = _fsdp1_state(other, StateDictType.SHARDED_STATE_DICT)
    with shared_directory() as directory:
        dcp.save(_fsdp1_state(model, StateDictType.SHARDED_STATE_DICT), checkpoint_id=directory)
        dcp.load(state, checkpoint_id=directory)
    with FullyShardedDataParallel.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        other.load_state_dict(state)
    assert_all(assert_same, _summoned(other), weights_of(new_net(UNEVEN)))


@on_the_device
def test_an_fsdp1_local_state_dict_loads() -> None:
    model, other = _fsdp1(new_net()), _fsdp1(other_net())
    state = _fsdp1_state(model, StateDictType.LOCAL_STATE_DICT)
    with FullyShardedDataParallel.state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
        other.load_state_dict(state)
    assert_all(assert_same, _summoned(other), weights_of(new_net()))


@on_the_device
def test_fsdp1_training_resumes_from_whole_states_as_if_it_had_not_stopped() -> None:
    configs = (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    )
    first, second = (_fsdp1(net, use_orig_params=True) for net in (new_net(), other_net()))
    optimizer, another = adamw(first), adamw(second)
    train(first, optimizer, steps=[0])
    with FullyShardedDataParallel.state_dict_type(first, *configs):
        weights, state = first.state_dict(), FullyShardedDataParallel.optim_state_dict(first, optimizer)
    with FullyShardedDataParallel.state_dict_type(second, *configs):
        second.load_state_dict(weights)
        another.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(second, another, state))
    train(second, another, steps=range(1, STEPS))
    assert_all(assert_close, _summoned(second), trained_on_cpu()[0])


@on_the_device
def test_fsdp1_offloaded_by_hand_frees_its_shards_and_trains_on() -> None:
    from fsdp_doctor.case import offloading
    from fsdp_doctor.fsdp import reader

    freed, shards = [], []
    for use_orig_params, non_blocking in itertools.product((True, False), (True, False)):
        model = _fsdp1(new_net(), use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, steps=[0])
        shards.append(sum(_blocks(unit.shard) for unit in reader.read(model).fsdp1_units))
        before = allocated_bytes()
        offloading.offload(model, non_blocking=non_blocking)
        freed.append(before - allocated_bytes())
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        offloading.load(model, this_device(), non_blocking=non_blocking)
        train(model, optimizer, steps=range(1, STEPS))
        assert_all(assert_close, _summoned(model), _trained_with_sgd())
    assert freed == shards


def _blocks(tensor: torch.Tensor) -> int:
    """What the device counts for a tensor."""
    return -(-tensor.nbytes // 512) * 512


@functools.cache
def _trained_with_sgd() -> Tensors:
    net = new_net()
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), ranks=all_ranks())
    return weights_of(net)


@on_the_device
def test_ddp_trains_as_one_process_does() -> None:
    model = DistributedDataParallel(new_net().to(this_device()))
    losses = train(model, adamw(model))
    assert_close_losses(losses, trained_on_cpu()[1])
    assert_all(assert_close, weights_of(model.module), trained_on_cpu()[0])


@on_the_device
def test_ddp_gives_every_rank_the_weights_of_rank_0_and_syncs_after_no_sync() -> None:
    model = DistributedDataParallel((new_net() if this_rank() == 0 else other_net()).to(this_device()))
    assert_all(assert_same, weights_of(model.module), weights_of(new_net()))
    with model.no_sync():
        backward(model, 0, [this_rank()], this_device())
    backward(model, 1, [this_rank()], this_device())
    assert_all(assert_close, gradient_shards_of(model.module), gradients_on_cpu(steps=2))


# LoRA


@functools.cache
def _lora_template() -> nn.Module:
    import peft
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights="gaussian")
    return peft.get_peft_model(Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)), adapters)


@functools.cache
def _trained_lora() -> Tensors:
    model = copy.deepcopy(_lora_template())
    train(model, adamw(model), ranks=all_ranks())
    return weights_of(model)


def _check_lora(**options: Any) -> None:
    model = copy.deepcopy(_lora_template())
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh_of_all(), **options)
    fully_shard(model, mesh=mesh_of_all(), **options)
    before = {name: shard.cpu().clone() for name, shard in shards_of(model).items()}
    train(model, adamw(model))
    after = {name: shard.cpu() for name, shard in shards_of(model).items()}
    assert_all(assert_close, after, parts_of(_trained_lora()))
    for name, shard in after.items():
        changed = not torch.equal(shard, before[name])
        assert changed == ("lora_" in name and shard.numel() > 0), f"{name}: changed {changed}"


@on_the_device
def test_lora_under_fsdp2_trains_the_adapters_and_nothing_else() -> None:
    _check_lora()


@on_the_device
def test_lora_under_cpu_offload_trains_the_adapters_and_nothing_else() -> None:
    _check_lora(offload_policy=CPUOffloadPolicy())
