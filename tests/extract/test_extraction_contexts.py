"""In every grad mode and in inference mode: the same values, as ordinary tensors, from every function that extracts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.extraction import (
    Tensors,
    adapted,
    all_trainable,
    assert_same,
    extracted,
    fsdp1,
    fsdp2,
    new_net,
    on_the_device,
    shard_qwen2,
    train_step,
)
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

from fsdp_doctor import fingerprint, full_state_dict, full_tensors, local_shards, weights_info
from fsdp_doctor.engines import packed_buckets, read_bucket, sglang_buckets, verl_weights

MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
}
HALF = {"dtype": torch.bfloat16, "keep_dtype": ("steps", "table")}
FEW_BYTES = {"bucket_bytes": 64 << 10}
WAYS: dict[str, Callable[[nn.Module], Tensors]] = {
    "full_tensors": lambda model: dict(full_tensors(model)),
    "full_tensors, cast": lambda model: dict(full_tensors(model, **HALF)),
    "full_tensors, many buckets": lambda model: dict(full_tensors(model, **FEW_BYTES)),
    "full_state_dict": lambda model: full_state_dict(model, ranks="all"),
    "local_shards": lambda model: {one.name: one.tensor for one in local_shards(model)},
    "local_shards, cast": lambda model: {one.name: one.tensor for one in local_shards(model, **HALF, **FEW_BYTES)},
    "packed_buckets": lambda model: {
        name: tensor
        for bucket in packed_buckets(full_tensors(model), 64 << 10)
        for name, tensor in read_bucket(bucket.buffer, bucket.index)
    },
    "sglang_buckets": lambda model: {
        name: tensor
        for one in sglang_buckets(full_tensors(model))
        for name, tensor in read_bucket(one.bucket.buffer, one.bucket.index)
    },
    "verl_weights": lambda model: dict(verl_weights(model)[0]),
}


def _pageable(model: nn.Module) -> nn.Module:
    return model.to("cpu")


KINDS: dict[str, Callable[[], nn.Module]] = {
    "fsdp2": lambda: fsdp2(new_net()),
    "fsdp2, policy": lambda: fsdp2(new_net(), offload_policy=CPUOffloadPolicy()),
    "fsdp2, pageable": lambda: _pageable(fsdp2(new_net())),
    "fsdp1": lambda: fsdp1(new_net(empty=False)),
    "fsdp1, offload": lambda: fsdp1(
        all_trainable(new_net(empty=False)), use_orig_params=False, cpu_offload=CPUOffload(offload_params=True)
    ),
    "plain": new_net,
}


def _use(tensors: Tensors, *where: str) -> None:
    """As a caller may in any mode: in place, and in what a backward goes through."""
    for name, tensor in tensors.items():
        assert not tensor.requires_grad, (*where, name)
        assert not tensor.is_inference(), (*where, name)
        if tensor.is_floating_point() and tensor.numel():
            tensor.mul_(2)
            with torch.inference_mode(False), torch.enable_grad():
                weight = torch.ones((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)
                (weight * tensor).sum().backward()
                tensor.mul_(2)


@on_the_device
def test_every_mode_gives_the_same_ordinary_tensors() -> None:
    for kind, build in KINDS.items():
        model = build()
        expected = {way: extract(model) for way, extract in WAYS.items()}
        prints, announced = fingerprint(model), weights_info(model)
        for mode, enter in MODES.items():
            for way, extract in WAYS.items():
                with enter():
                    tensors = extract(model)
                    for name, tensor in expected[way].items():
                        assert torch.equal(tensors[name].cpu(), tensor.cpu()), (kind, mode, way, name)
                    _use({name: tensor for name, tensor in tensors.items() if name != "head.weight"}, kind, mode, way)
            with enter():
                assert fingerprint(model) == prints, (kind, mode)
                assert weights_info(model) == announced, (kind, mode)


@on_the_device
def test_the_mode_may_change_while_tensors_are_pulled() -> None:
    for kind, build in KINDS.items():
        model = build()
        expected = dict(full_tensors(model))
        for pull in (
            lambda model: full_tensors(model, **FEW_BYTES),
            lambda model: _unpacked(full_tensors(model, **FEW_BYTES)),
        ):
            tensors = _in_turns(pull(model))
            for name, tensor in expected.items():
                assert torch.equal(tensors[name], tensor), (kind, name)
            _use({name: tensor for name, tensor in tensors.items() if name != "head.weight"}, kind)
        shards = {one.name: one.tensor for one in local_shards(model)}
        for name, tensor in _in_turns((one.name, one.tensor) for one in local_shards(model, **FEW_BYTES)).items():
            assert torch.equal(tensor, shards[name]), (kind, name)


def _unpacked(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for bucket in packed_buckets(tensors, 16 << 10):
        yield from read_bucket(bucket.buffer, bucket.index)


def _in_turns(tensors: Iterator[tuple[str, torch.Tensor]]) -> Tensors:
    found = {}
    for enter in itertools.cycle(MODES.values()):
        with enter():
            item = next(tensors, None)
        if item is None:
            return found
        found[item[0]] = item[1]
    raise AssertionError


@on_the_device
def test_adapters_are_merged_alike_in_every_mode() -> None:
    for offload in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        model = shard_qwen2(adapted(), **offload)
        expected, shards, prints = extracted(model), list(local_shards(model)), fingerprint(model)
        for enter in MODES.values():
            with enter():
                assert_same(extracted(model), expected)
                for one, other in zip(local_shards(model), shards, strict=True):
                    assert torch.equal(one.tensor, other.tensor), one.name
                assert fingerprint(model) == prints


@on_the_device
def test_a_model_trains_on_after_an_extraction_in_any_mode() -> None:
    for build in (KINDS["fsdp2"], KINDS["fsdp1"]):
        model, left_alone = build(), build()
        for enter in MODES.values():
            with enter():
                extracted(model)
            assert train_step(model) == train_step(left_alone)
