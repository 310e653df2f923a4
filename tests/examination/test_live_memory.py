"""``fsdp_doctor.measure_memory`` and what ``examine`` says of memory, on two ranks of the emulated device."""

from __future__ import annotations

import gc
from typing import Any

import torch
from support.examined import PINNED, equal, finding, fsdp1_model, fsdp2_model, kinds, on_two_ranks, train, trained
from support.ranks import accelerator, this_device, this_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)

import fsdp_doctor
from fsdp_doctor import examine, measure_memory
from fsdp_doctor.case import offloading
from fsdp_doctor.examination.memory_records import sum_classes


def _allocated() -> int:
    return int(accelerator().memory_allocated(this_device()))


@on_two_ranks
def test_the_ledger_of_a_live_model_adds_up_to_the_allocated_memory() -> None:
    # A thread of gloo's lets go of a collective's tensors some time after it was done: they may be freed meanwhile.
    models = fsdp2_model, lambda: fsdp1_model(use_orig_params=False), lambda: fsdp1_model(use_orig_params=True)
    for new_model in models:
        gc.collect()
        before = _allocated()
        model = new_model()
        optimizer = train(model)
        gc.collect()
        earlier = _allocated()
        found = measure_memory(model, optimizer)
        assert found.device is not None
        held, later = sum_classes(found.device.held), _allocated()
        assert later <= held <= earlier, (later, held, earlier)
        unexplained = found.device.held.get("unexplained", 0)
        assert unexplained <= before, (unexplained, before)
        equal({"parameters", "optimizer state", "buffers"} <= found.device.held.keys(), True)
        del model, optimizer, found


@on_two_ranks
def test_one_rank_alone_may_ask_for_a_ledger() -> None:
    model = fsdp2_model()
    if this_rank() == 1:
        equal(fsdp_doctor.measure_memory(model).rank, 1)


@on_two_ranks
def test_gradients_and_what_a_forward_left_unsharded_have_their_classes() -> None:
    net = fully_shard(nn.Linear(64, 64).to(this_device()))
    net(torch.ones(1, 64, device=this_device()))
    unsharded = measure_memory(net).device
    assert unsharded is not None
    equal(unsharded.held["unsharded parameters"] >= 64 * 64 * 4, True)
    net(torch.ones(1, 64, device=this_device())).sum().backward()
    trained = measure_memory(net).device
    assert trained is not None
    equal(trained.held["gradients"], trained.held["parameters"])
    equal("unsharded parameters" in trained.held, False)


@on_two_ranks
def test_an_unsharded_fsdp1_model_stays_through_an_offload_and_doubles_after_loading() -> None:
    net = FullyShardedDataParallel(
        nn.Linear(64, 64), device_id=this_device(), sharding_strategy=ShardingStrategy.NO_SHARD
    )
    net(torch.ones(1, 64, device=this_device())).sum().backward()
    held = [_parameters_held(net)]
    offloading.offload(net, non_blocking=False)
    held.append(_parameters_held(net))
    offloading.load(net, this_device(), non_blocking=False)
    held.append(_parameters_held(net))
    net(torch.ones(1, 64, device=this_device()))
    held.append(_parameters_held(net))
    equal([nbytes // max(held[0]) for pair in held for nbytes in pair], [1, 0, 0, 1, 1, 1, 1, 0])


def _parameters_held(net: nn.Module) -> tuple[int, int]:
    """Counts the bytes of parameters in shards, and beside them."""
    device = measure_memory(net).device
    assert device is not None
    return device.held.get("parameters", 0), device.held.get("unsharded parameters", 0)


@on_two_ranks
def test_shards_under_a_pinning_policy_are_pinned_in_powers_of_two() -> None:
    found = measure_memory(fsdp2_model(offload_policy=PINNED))
    equal(found.host.pinned, found.host.held["parameters"])
    equal(found.host.pinned_reserved > found.host.pinned, True)
    equal("parameters" in found.device.held if found.device else None, False)


@on_two_ranks
def test_a_model_on_the_cpu_has_a_ledger_of_the_host_alone() -> None:
    found = measure_memory(nn.Linear(8, 8))
    equal((found.device, found.host.pageable), (None, (64 + 8) * 4))


@on_two_ranks
def test_examine_names_a_model_that_stands_unsharded_beside_its_shards() -> None:
    net = fully_shard(nn.Linear(64, 64).to(this_device()))
    net(torch.ones(1, 64, device=this_device()))
    found = finding(net, "unsharded-copy")
    equal((found.severity, len(found.names)), ("note", 2))
    net.reshard()
    equal(kinds(examine(net)), [])


@on_two_ranks
def test_examine_names_a_held_state_dict_unless_it_shares_the_models_memory() -> None:
    model = fsdp2_model()
    own = model.state_dict()
    equal(kinds(examine(model)), [])
    held = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in own.items()}
    found = finding(model, "state-dict-held")
    equal((found.severity, "6 tensors" in found.sentence), ("note", True))
    del held
    equal(kinds(examine(model)), [])
    # The shards that it has are the model's no more, and stay on the device.
    model.to("cpu")
    equal("state-dict-held" in kinds(examine(model)), True)
    del own


@on_two_ranks
def test_examine_names_gradients_that_an_offload_leaves_on_the_device() -> None:
    model = fsdp1_model(use_orig_params=False)
    model(torch.ones(2, 4, device=this_device())).sum().backward()
    offloading.offload(model, non_blocking=False)
    found = finding(model, "gradients-kept")
    equal((found.severity, len(found.names)), ("hazard", 2))
    for parameter in model.parameters():
        parameter.grad = None
    equal("gradients-kept" in kinds(examine(model)), False)


@on_two_ranks
def test_examine_names_a_useless_manual_offload_until_a_forward_frees_the_memory() -> None:
    def stages(**options: Any) -> list[list[str]]:
        model = trained(fsdp1_model(sharding_strategy=ShardingStrategy.NO_SHARD, **options))
        found = [kinds(examine(model), "hazard")]
        offloading.offload(model, non_blocking=False)
        found.append(kinds(examine(model), "hazard"))
        offloading.load(model, this_device(), non_blocking=False)
        found.append(kinds(examine(model), "hazard"))
        model(torch.ones(2, 4, device=this_device()))
        return [*found, kinds(examine(model), "hazard")]

    kept = ["offload-frees-nothing"]
    equal(stages(use_orig_params=False), [[], kept, kept, []])
    # The flat gradients stay, too.
    equal(stages(use_orig_params=True), [[], ["gradients-kept", *kept], kept, []])
    cast = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    equal(stages(use_orig_params=False, mixed_precision=cast), [[], [], [], []])
    model = trained(fsdp1_model(sharding_strategy=ShardingStrategy.NO_SHARD))
    offloading.offload(model, non_blocking=False)
    found = finding(model, "offload-frees-nothing")
    equal((found.entry, len(found.names)), ("fsdp1-no-shard-offload-frees-nothing", 2))


@on_two_ranks
def test_a_manual_offload_of_unsharded_original_parameters_frees_nothing() -> None:
    model = trained(fsdp1_model(sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True))
    before, (shards, _) = torch.emulated.memory_allocated(), _parameters_held(model)
    offloading.offload(model, non_blocking=False)
    equal(torch.emulated.memory_allocated(), before)
    equal(_parameters_held(model), (0, shards))


@on_two_ranks
def test_examine_notes_pinned_memory_that_rounding_doubles() -> None:
    mesh = init_device_mesh("emulated", (2,))
    # Of each shard 2.25 MiB, for which 4 MiB are pinned.
    large = fully_shard(nn.Linear(1024, 1152, bias=False), mesh=mesh, offload_policy=PINNED)
    found = finding(large, "pinned-twice")
    equal((found.severity, found.entry), ("note", "pinned-host-memory-doubles"))
    even = fully_shard(nn.Linear(1024, 1024, bias=False), mesh=mesh, offload_policy=PINNED)
    equal(kinds(examine(even)), [])
    equal(kinds(examine(fsdp1_model(cpu_offload=CPUOffload(True)))), [])
