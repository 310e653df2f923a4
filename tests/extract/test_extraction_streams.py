"""Streams wait for one another wherever they touch the same memory: under the race detector, on every way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.extraction import (
    INTEGERS,
    MIB,
    Many,
    adapted,
    all_trainable,
    extracted,
    fsdp1,
    fsdp2,
    new_net,
    on_the_device,
    shard_qwen1,
    shard_qwen2,
)
from support.ranks import accelerator, this_device
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel

BF16 = {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}


def _ways() -> Iterator[tuple[Callable[[], nn.Module], list[dict[str, Any]]]]:
    sizes: list[dict[str, Any]] = [{"bucket_bytes": nbytes} for nbytes in (64 << 10, 8 * MIB)]
    yield lambda: fsdp2(new_net()), [*sizes, BF16]
    for pin_memory in (True, False):
        policy = CPUOffloadPolicy(pin_memory=pin_memory)
        yield lambda policy=policy: fsdp2(new_net(), offload_policy=policy), [*sizes, BF16]
    for use_orig_params in (True, False):
        for options in ({}, {"cpu_offload": CPUOffload(offload_params=True)}):
            every = {"use_orig_params": use_orig_params, **options}
            yield lambda every=every: fsdp1(all_trainable(new_net(empty=False)), **every), [*sizes, BF16]
            every |= {"device_id": this_device()}
            yield lambda every=every: FullyShardedDataParallel(Many(), **every), [{"bucket_bytes": 64 << 10}]


@on_the_device
def test_no_two_streams_race_for_memory() -> None:
    for build, calls in _ways():
        model = build()
        for options in calls:
            with accelerator().race_detection():
                extracted(model, **options)


@on_the_device
def test_no_two_streams_race_for_memory_while_adapters_are_merged() -> None:
    for model in (
        shard_qwen2(adapted()),
        shard_qwen2(adapted(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
        shard_qwen1(adapted()),
        shard_qwen1(adapted(), cpu_offload=CPUOffload(offload_params=True)),
    ):
        for nbytes in (1 << 16, 8 * MIB):
            with accelerator().race_detection():
                extracted(model, bucket_bytes=nbytes)
