"""Streams wait for one another wherever they touch the same memory: under the race detector, on every way."""

from __future__ import annotations

import itertools
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
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, fully_shard

from fsdp_doctor import full_tensors, local_shards
from fsdp_doctor.engines import packed_buckets, read_bucket

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


class Shapes(nn.Module):
    """Layers with biases, rows that do not divide by the ranks, tensors larger than a bucket, and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.biased = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        self.uneven = nn.Sequential(*(nn.Linear(129, 127) for _ in range(4)))
        self.large = nn.Linear(256, 1024)
        self.table = nn.Embedding(33, 64)
        self.head = nn.Linear(64, 33, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.linspace(0, 1, 64))


def _shapes() -> Iterator[Callable[[], nn.Module]]:
    def fsdp2(**options: Any) -> nn.Module:
        model = Shapes()
        if not options:
            model.to(this_device())
        for part in (*model.biased, *model.uneven, model.large):
            fully_shard(part, **options)
        return fully_shard(model, **options)

    def fsdp1(**options: Any) -> nn.Module:
        model = Shapes()
        for name in ("biased", "uneven"):
            setattr(model, name, FullyShardedDataParallel(getattr(model, name), device_id=this_device(), **options))
        return FullyShardedDataParallel(model, device_id=this_device(), **options)

    yield fsdp2
    for pin_memory in (True, False):
        yield lambda pin_memory=pin_memory: fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
    yield fsdp1
    yield lambda: fsdp1(cpu_offload=CPUOffload(offload_params=True))
    yield lambda: shard_qwen2(adapted())


def _packed_in_turns(tensors: Iterator[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """As a sender with two buffers: each on a stream of its own, on which it takes tensors and packs them."""
    streams = [accelerator().Stream(this_device()) for _ in range(2)]
    packed = []
    for stream in itertools.cycle(streams):
        stream.synchronize()
        with accelerator().stream(stream):
            taken = [tensor.reshape(-1).view(torch.uint8) for _, tensor in itertools.islice(tensors, 3)]
            if not taken:
                return packed
            packed.append(torch.cat(taken))
            del taken
    raise AssertionError


def _unpacked_in_turns(tensors: Iterator[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    streams = [accelerator().Stream(this_device()) for _ in range(2)]
    buckets = packed_buckets(tensors, 40 << 10)
    found = []
    for stream in itertools.cycle(streams):
        with accelerator().stream(stream):
            bucket = next(buckets, None)
            if bucket is None:
                return found
            found += [tensor.reshape(-1).view(torch.uint8).clone() for _, tensor in read_bucket(*vars(bucket).values())]
            del bucket
    raise AssertionError


@on_the_device
def test_tensors_may_be_taken_on_other_streams_in_turns() -> None:
    """Of what is yielded, nobody else writes to its memory before the stream that took it has read it."""
    for build in _shapes():
        model = build()
        pulls: list[Callable[[], Iterator[tuple[str, torch.Tensor]]]] = [
            lambda model=model: full_tensors(model, bucket_bytes=64 << 10),
            lambda model=model: full_tensors(model, bucket_bytes=64 << 10, dtype=torch.bfloat16),
            lambda model=model: full_tensors(model),
            lambda model=model: ((one.name, one.tensor) for one in local_shards(model, bucket_bytes=32 << 10)),
        ]
        for pull in pulls:
            expected = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in pull()])
            for consume in (_packed_in_turns, _unpacked_in_turns):
                with accelerator().race_detection():
                    packed = consume(pull())
                    accelerator().synchronize()
                assert torch.equal(torch.cat(packed), expected)


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
