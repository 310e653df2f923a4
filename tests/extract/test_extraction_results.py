"""weights_info and full_state_dict, and the memory that an extraction takes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from support.extraction import (
    INTEGERS,
    MIB,
    Tensors,
    assert_same,
    cast_of,
    everywhere,
    extracted,
    fsdp1,
    fsdp2,
    mesh_over,
    new_net,
    on_the_device,
    tensors_of,
    train_step,
)
from support.ranks import (
    accelerator,
    this_device,
    this_rank,
    together,
)
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    fully_shard,
)

from fsdp_doctor import full_state_dict, full_tensors, weights_info


@everywhere
def test_weights_info_is_what_full_tensors_yields() -> None:
    bfloat16 = {"dtype": torch.bfloat16, "keep_dtype": (*INTEGERS, "scale")}
    for model in (fsdp2(new_net()), fsdp1(new_net(empty=False)), new_net().to(this_device())):
        for options in ({}, bfloat16):
            info = [(name, one.shape, one.dtype) for name, one in weights_info(model, **options).items()]
            yielded = [(name, one.shape, one.dtype) for name, one in full_tensors(model, **options)]
            assert info == yielded
            small = [name for name, _ in full_tensors(model, bucket_bytes=64 << 10, **options)]
            assert small == [name for name, *_ in info], "the order depends on the bucket"


@everywhere
def test_weights_info_needs_no_other_rank() -> None:
    """The others wait for the one rank; in a collective they would meet it in the wrong one."""
    model = fsdp2(new_net())
    if this_rank() == 1:
        assert sorted(weights_info(model)) == sorted(new_net().state_dict())
    together()
    assert len(extracted(model)) == len(new_net().state_dict())


@everywhere
def test_full_state_dict_is_on_the_cpu_of_rank_0_or_all() -> None:
    cpu = torch.device("cpu")
    for shard, empty in ((fsdp2, True), (fsdp1, False)):
        net = new_net(empty=empty)
        expected = tensors_of(net)
        model = shard(net)
        for options in ({}, {"bucket_bytes": 64 << 10}):
            state = full_state_dict(model, **options)
            assert_same(state, expected if this_rank() == 0 else {}, cpu)
            state = full_state_dict(model, ranks="all", **options)
            assert_same(state, expected, cpu)
            assert state["embed.weight"] is state["head.weight"]
            assert not any(tensor.is_pinned() for tensor in state.values())
        cast = full_state_dict(model, ranks="all", dtype=torch.bfloat16, keep_dtype=INTEGERS)
        assert_same(cast, cast_of(expected, torch.bfloat16), cpu)


@everywhere
def test_a_state_dict_outlives_training() -> None:
    model = fsdp2(new_net())
    state = full_state_dict(model, ranks="all")
    copies = _clones(state)
    train_step(model)
    assert_same(state, copies, torch.device("cpu"))


def _clones(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


class Wide(nn.Module):
    """80 MiB in tensors of 2 MiB and one of 8, with small ones between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 1024) for _ in range(36))
        self.head = nn.Linear(1024, 2048)


@on_the_device
def test_device_memory_stays_within_two_buckets_and_a_tensor() -> None:
    bucket, largest = 4 * MIB, 8 * MIB
    builders: dict[str, Callable[[], nn.Module]] = {
        "fsdp2": lambda: fully_shard(Wide().to(this_device()), mesh=mesh_over()),
        "fsdp2 with a policy": lambda: fully_shard(
            Wide().to(this_device()), mesh=mesh_over(), offload_policy=CPUOffloadPolicy(pin_memory=True)
        ),
        "fsdp1": lambda: FullyShardedDataParallel(Wide(), device_id=this_device(), use_orig_params=True),
    }
    for name, build in builders.items():
        model = build()
        gc.collect()
        accelerator().synchronize()
        before = accelerator().memory_allocated()
        accelerator().reset_peak_memory_stats()
        total = 0
        for _, tensor in full_tensors(model, bucket_bytes=bucket):
            total += tensor.cpu().nbytes
            del tensor
        used = accelerator().max_memory_allocated() - before
        assert total > 64 * MIB
        assert used >= largest, f"{name}: {used} bytes cannot be"
        assert used <= 2 * bucket + largest, f"{name}: {used / MIB:.1f} MiB at once"
        assert accelerator().memory_allocated() == before, f"{name}: memory is not given back"
