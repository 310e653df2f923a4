"""Streams, threads and autograd modes: no races, and the same values in all of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from support.extraction import (
    INTEGERS,
    MIB,
    Many,
    Tensors,
    adapted,
    all_trainable,
    assert_same,
    cast_of,
    extracted,
    fsdp1,
    fsdp2,
    mesh_over,
    new_net,
    on_the_device,
    raises_soon,
    shard_qwen1,
    shard_qwen2,
    train_step,
)
from support.ranks import accelerator, this_device, this_rank, together
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, fully_shard

from fsdp_doctor import RepeatedFingerprint, fingerprint, full_state_dict, full_tensors, local_shards, weights_info
from fsdp_doctor.weights.engines import packed_buckets, read_bucket
from fsdp_doctor.weights.extract import ClosingIterator
from fsdp_doctor.weights.transport import host_copies
from fsdp_doctor.weights.transport.streams import Streams

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
                extracted_with_fingerprints(model, **options)


def extracted_with_fingerprints(model: nn.Module, **options: Any) -> None:
    trained = RepeatedFingerprint(model, **options)
    for _ in range(2):
        for _, tensor in trained.full_tensors():
            tensor.zero_()
        assert trained.read().tensors


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
        if "offload_policy" not in options:
            model.to(this_device())
        for part in (*model.biased, *model.uneven, model.large):
            fully_shard(part, **options)
        return fully_shard(model, **options)

    def fsdp1(**options: Any) -> nn.Module:
        model = Shapes()
        for name in ("biased", "uneven"):
            setattr(model, name, FullyShardedDataParallel(getattr(model, name), device_id=this_device(), **options))
        return FullyShardedDataParallel(model, device_id=this_device(), **options)

    for shape in ((2,), (1, 2), (2, 1)):
        yield lambda shape=shape: fsdp2(mesh=mesh_over(*shape))
    yield lambda: fsdp2().to("cpu")
    for pin_memory in (True, False):
        yield lambda pin_memory=pin_memory: fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
    for use_orig_params in (True, False):
        for offload in (False, True):
            every = {"use_orig_params": use_orig_params, "cpu_offload": CPUOffload(offload_params=offload)}
            yield lambda every=every: fsdp1(**every)
    yield lambda: shard_qwen2(adapted())


def _packed_in_turns(tensors: Iterator[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Packs as a sender with two buffers: each on a stream of its own, on which it takes tensors and packs them."""
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


def _stopped_early(tensors: ClosingIterator[Any]) -> None:
    """Stops early: what was still being loaded is let go of, and its memory is allocated again."""
    streams = itertools.cycle([accelerator().Stream(this_device()) for _ in range(2)])
    for stream in itertools.islice(streams, 7):
        with accelerator().stream(stream):
            next(tensors)
    with accelerator().stream(next(streams)):
        tensors.close()
    for _ in range(16):
        torch.ones(16 << 10, device=this_device())


@on_the_device
def test_tensors_may_be_taken_on_other_streams_in_turns() -> None:
    """Nobody writes to the memory of what is yielded before the stream that took it has read it."""
    for build in _shapes():
        model = build()
        pulls: list[Callable[[], Iterator[tuple[str, torch.Tensor]]]] = [
            lambda model=model: full_tensors(model, bucket_bytes=64 << 10),
            lambda model=model: full_tensors(model, bucket_bytes=64 << 10, dtype=torch.bfloat16),
            lambda model=model: full_tensors(model),
            lambda model=model: full_tensors(model, bucket_bytes=64 << 10, in_step=True),
            lambda model=model: RepeatedFingerprint(model, bucket_bytes=64 << 10).full_tensors(),
            lambda model=model: ((shard.name, shard.tensor) for shard in local_shards(model, bucket_bytes=32 << 10)),
        ]
        for pull in pulls:
            expected = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in pull()])
            for consume in (_packed_in_turns, _unpacked_in_turns):
                with accelerator().race_detection():
                    packed = consume(pull())
                    accelerator().synchronize()
                assert torch.equal(torch.cat(packed), expected)
        for stopping in (full_tensors(model, bucket_bytes=64 << 10), local_shards(model, bucket_bytes=32 << 10)):
            with accelerator().race_detection():
                _stopped_early(stopping)
            together()


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


ROWS = {"large_rows": 9001}


def _offloaded() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Makes a model of which each rank has 9 MiB, in pageable memory."""
    model = fsdp2(new_net(**ROWS))
    expected = extracted(model)
    model.to("cpu")
    return model, expected


@on_the_device
def test_at_most_eight_threads_read_pageable_shards_through_little_pinned_memory() -> None:
    model, expected = _offloaded()
    threads: set[int] = set()
    pinned: list[int] = []
    read, empty = host_copies._read, torch.empty

    def noted_read(batch: Any, chunks: Any) -> None:
        threads.add(threading.get_ident())
        read(batch, chunks)

    def noted_empty(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*arguments, **options)
        if options.get("pin_memory"):
            pinned.append(tensor.nbytes)
        return tensor

    with mock.patch.object(host_copies, "_read", noted_read), mock.patch.object(torch, "empty", noted_empty):
        assert_same(extracted(model, bucket_bytes=4 << 20), expected)
    assert 1 <= len(threads) <= 8
    assert threading.get_ident() not in threads
    assert 0 < sum(pinned) <= 512 << 20
    assert not [thread for thread in threading.enumerate() if thread.ident in threads]


@on_the_device
def test_what_counts_as_read_is_referred_to_by_no_thread() -> None:
    """The thread that loses the processor right after it has said so is no exception: there it waits for the test."""
    go_on = threading.Event()

    class Paused(host_copies._Submission):
        def note_done(self) -> None:
            super().note_done()
            go_on.wait()

    before = accelerator().memory_allocated()
    with mock.patch.object(host_copies, "_Submission", Paused):
        copies = host_copies.HostCopies(Streams(this_device()))
        target = torch.empty(4 << 20, dtype=torch.uint8, device=this_device())
        copies.copy(host_copies.InMemory(torch.ones(4 << 20, dtype=torch.uint8)), target)
        copies.finish()
        del target
        held = accelerator().memory_allocated() - before
        go_on.set()
        copies.close()
    assert held == 0


@on_the_device
def test_without_threads_or_with_less_pinned_memory_the_values_are_the_same() -> None:
    """Covers one rank alone, too."""
    model, expected = _offloaded()
    half = {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}
    for missing in (_threads(0), _threads(1), _pinned(0), _pinned(2), [*_threads(0), *_pinned(0)]):
        with ExitStack() as stack:
            if this_rank() == 0:
                for patch in missing:
                    stack.enter_context(patch)
            assert_same(extracted(model, bucket_bytes=4 << 20), expected)
            assert_same(extracted(model, **half), cast_of(expected, torch.bfloat16))


def _threads(most: int) -> list[Any]:
    """Has the system start no more than so many."""
    start, started = threading.Thread.start, iter(range(1 << 30))

    def limited(self: threading.Thread) -> None:
        if next(started) >= most:
            raise RuntimeError("can't start new thread")
        start(self)

    return [mock.patch.object(host_copies.threading.Thread, "start", limited)]


def _pinned(most: int) -> list[Any]:
    """Has the system pin no more than so many chunks."""
    empty, pinned = torch.empty, iter(range(1 << 30))

    def limited(*arguments: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory") and next(pinned) >= most:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*arguments, **options)

    return [mock.patch.object(torch, "empty", limited)]


@on_the_device
def test_a_reader_that_fails_is_the_error_of_the_call() -> None:
    model, expected = _offloaded()
    for owner, name in ((host_copies, "_read"), (Streams, "enter_thread")):
        failing = mock.patch.object(owner, name, side_effect=OSError("it is gone"))
        with raises_soon(OSError, "it is gone"), failing:
            extracted(model)
        together()
        assert_same(extracted(model), expected)


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
}


KINDS: dict[str, Callable[[], nn.Module]] = {
    "fsdp2": lambda: fsdp2(new_net()),
    "fsdp2, policy": lambda: fsdp2(new_net(), offload_policy=CPUOffloadPolicy()),
    "fsdp2, pageable": lambda: fsdp2(new_net()).to("cpu"),
    "fsdp1": lambda: fsdp1(new_net(empty=False)),
    "fsdp1, offload": lambda: fsdp1(
        all_trainable(new_net(empty=False)), use_orig_params=False, cpu_offload=CPUOffload(offload_params=True)
    ),
    "plain": new_net,
}


def _use(tensors: Tensors, *where: str) -> None:
    """Uses it as a caller may in any mode: in place, and in what a backward goes through."""
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
        shards = {shard.name: shard.tensor for shard in local_shards(model)}
        for name, tensor in _in_turns((shard.name, shard.tensor) for shard in local_shards(model, **FEW_BYTES)).items():
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
                for shard, other in zip(local_shards(model), shards, strict=True):
                    assert torch.equal(shard.tensor, other.tensor), shard.name
                assert fingerprint(model) == prints


@on_the_device
def test_a_model_trains_on_after_an_extraction_in_any_mode() -> None:
    for build in (KINDS["fsdp2"], KINDS["fsdp1"]):
        model, left_alone = build(), build()
        for enter in MODES.values():
            with enter():
                extracted(model)
            assert train_step(model) == train_step(left_alone)
