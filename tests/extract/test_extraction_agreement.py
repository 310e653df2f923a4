"""Ranks that leave, come late or disagree: all are told soon, and nothing is left behind."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.extraction import (
    FEW_BYTES,
    INTEGERS,
    MIB,
    assert_same,
    everywhere,
    extracted,
    fsdp1,
    fsdp2,
    mesh_over,
    new_net,
    on_the_device,
    raises_soon,
    tensors_of,
)
from support.ranks import (
    Setting,
    device_type,
    of_all_ranks,
    on_ranks,
    this_device,
    this_rank,
    together,
    world_size,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    fully_shard,
)

from fsdp_doctor import PlanMismatch, RankLeft, full_tensors
from fsdp_doctor.extract import agreement
from fsdp_doctor.fsdp import private


def _take_one(model: nn.Module) -> None:
    for _ in full_tensors(model, bucket_bytes=FEW_BYTES):
        break


def _raise_after_one(model: nn.Module) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in full_tensors(model, bucket_bytes=FEW_BYTES):
            raise ZeroDivisionError


def _drop_unstarted(model: nn.Module) -> None:
    full_tensors(model, bucket_bytes=FEW_BYTES)


def _close_after_one(model: nn.Module) -> None:
    tensors = full_tensors(model, bucket_bytes=FEW_BYTES)
    next(tensors)
    tensors.close()


@everywhere
def test_when_a_rank_leaves_the_others_are_told_which() -> None:
    for build in (lambda: fsdp2(new_net()), lambda: fsdp1(new_net(empty=False))):
        model = build()
        expected = extracted(model)
        for leave in (_take_one, _raise_after_one, _drop_unstarted, _close_after_one):
            leaver = world_size() - 1
            together()
            if this_rank() == leaver:
                leave(model)
            else:
                with raises_soon(RankLeft, f"rank {leaver} left"):
                    extracted(model, bucket_bytes=FEW_BYTES)
            assert_same(extracted(model), expected)


@on_ranks(Setting("cpu", 4))
def test_under_hsdp_a_rank_that_leaves_stops_its_own_replica_only() -> None:
    net = new_net()
    expected = tensors_of(net)
    model = fsdp2(net, mesh_over(2, 2))
    together()
    if this_rank() == 1:
        _take_one(model)
    elif this_rank() == 0:
        with raises_soon(RankLeft, "rank 1 left"):
            extracted(model, bucket_bytes=FEW_BYTES)
    else:
        assert_same(extracted(model, bucket_bytes=FEW_BYTES), expected)
    assert_same(extracted(model), expected)


@everywhere
def test_when_the_extraction_fails_on_a_rank_the_others_are_told_which() -> None:
    """A shard that is not as long as it must be is found when its bucket is loaded."""
    net = new_net()
    expected = tensors_of(net)
    model = fsdp2(net)
    whole = model.large.weight._local_tensor
    if this_rank() == 1:
        model.large.weight._local_tensor = whole[:-1]
        with raises_soon(RuntimeError, "large.weight", "elements where"):
            extracted(model, bucket_bytes=FEW_BYTES)
        model.large.weight._local_tensor = whole
    else:
        with raises_soon(RankLeft, "rank 1 left", "large.weight"):
            extracted(model, bucket_bytes=FEW_BYTES)
    assert_same(extracted(model), expected)


@everywhere
def test_ranks_with_different_arguments_all_raise_plan_mismatch() -> None:
    net = new_net()
    expected = tensors_of(net)
    model = fsdp2(net)
    bfloat16 = {"dtype": torch.bfloat16, "keep_dtype": INTEGERS}
    for odd in (0, world_size() - 1):
        for usual, other, words in (
            ({}, bfloat16, ("dtype=None", "dtype=torch.bfloat16")),
            ({}, {"bucket_bytes": FEW_BYTES}, ("bucket_bytes=1024",)),
            (bfloat16, {**bfloat16, "keep_dtype": (*INTEGERS, "scale")}, ("scale", "float32", "bfloat16")),
        ):
            with raises_soon(PlanMismatch, *words):
                extracted(model, **(other if this_rank() == odd else usual))
            assert_same(extracted(model), expected)


@everywhere
def test_ranks_with_different_models_all_raise_plan_mismatch() -> None:
    for net, words in (
        (nn.Linear(4, 13 if this_rank() == 1 else 12), ("weight", "12, 4", "13, 4")),
        (nn.Linear(4, 12, bias=this_rank() != 1), ("bias", "nothing more")),
    ):
        with raises_soon(PlanMismatch, *words):
            extracted(fully_shard(net.to(this_device()), mesh=mesh_over()))
    assert len(extracted(fully_shard(nn.Linear(4, 12).to(this_device()), mesh=mesh_over()))) == 2


@everywhere
def test_a_rank_that_comes_after_the_others_gave_up_is_told() -> None:
    """They wait as long as the store does."""
    net = new_net()
    expected = tensors_of(net)
    model = fsdp2(net)
    late = world_size() - 1
    store = agreement._connection(private.default_store())
    if this_rank() != late:
        usual = store.timeout
        store.set_timeout(datetime.timedelta(seconds=1))
        error = _error(RankLeft, lambda: extracted(model), f"only {late} of {world_size()} ranks came to call")
        store.set_timeout(usual)
        together()
    else:
        together()
        error = _error(RankLeft, lambda: extracted(model))
    _no_errors(error)
    assert_same(extracted(model), expected)


@everywhere
def test_a_rank_that_calls_once_more_is_told_its_number_and_how_many_the_others_made() -> None:
    """And they are told at their next call, without a wait; the one after it is in step again."""
    net = new_net()
    expected = tensors_of(net)
    model = fsdp2(net)
    assert_same(extracted(model), expected)
    ranks = tuple(range(world_size()))
    made = agreement._here.num_agreements[ranks]
    words = (f"only 1 of {world_size()} ranks came to call {made + 1} ", f"have come to {made} at most")
    error = ""
    if this_rank() == 0:
        store = agreement._connection(private.default_store())
        usual = store.timeout
        store.set_timeout(datetime.timedelta(seconds=1))
        error = _error(RankLeft, lambda: extracted(model), *words)
        store.set_timeout(usual)
    together()
    if this_rank() != 0:
        error = _error(RankLeft, lambda: extracted(model), *words)
    _no_errors(error)
    assert_same(extracted(model), expected)


@everywhere
def test_a_rank_whose_arguments_are_refused_does_not_hold_up_the_others() -> None:
    """Nor the next extraction."""
    net = new_net()
    expected = tensors_of(net)
    model = fsdp2(net)
    refused = world_size() - 1
    if this_rank() == refused:
        error = _error(TypeError, lambda: extracted(model, dtype=torch.int8))
    else:
        error = _error(RankLeft, lambda: extracted(model), f"rank {refused} left")
    _no_errors(error)
    assert_same(extracted(model), expected)


def _error(kind: type[BaseException], call: Callable[[], Any], *words: str) -> str:
    """What is wrong with the exception that ``call`` is to raise."""
    try:
        with raises_soon(kind, *words):
            call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _no_errors(error: str) -> None:
    """So that all ranks end the check where one fails."""
    errors = of_all_ranks(error)
    assert not any(errors), errors


@everywhere
def test_a_device_of_another_kind_is_refused_before_anything_is_sent() -> None:
    model = fsdp2(new_net())
    with raises_soon(ValueError, "are gathered on"):
        full_tensors(model, device="meta")
    with raises_soon(ValueError, "are gathered on"):
        full_tensors(model, device="cuda:0" if device_type() == "cpu" else "cpu")
    assert len(extracted(model, device=device_type())) == len(new_net().state_dict())


@on_the_device
def test_a_group_without_a_backend_for_the_device_is_refused() -> None:
    group = dist.new_group(backend="cpu:gloo")
    mesh = DeviceMesh.from_group(group, "emulated", list(range(world_size())))
    model = fully_shard(nn.Linear(4, 4).to(this_device()), mesh=mesh)
    with raises_soon(RuntimeError, "no backend for emulated"):
        full_tensors(model)


# The store


@everywhere
def test_extractions_leave_no_keys_in_the_store() -> None:
    model = fsdp2(new_net())
    for bucket_bytes in (8 * MIB, FEW_BYTES):
        counts = []
        for _ in range(21):
            for _ in full_tensors(model, bucket_bytes=bucket_bytes):
                pass
            together()
            counts.append(private.default_store().num_keys())
            together()
        assert counts[-1] == counts[0], f"bucket_bytes={bucket_bytes}: keys after each: {counts}"


@everywhere
def test_extractions_that_failed_leave_no_keys_in_the_store() -> None:
    """As many keys after the tenth as after the first, each followed by one that succeeded."""
    model = fsdp2(new_net())
    counts = []
    for _ in range(10):
        together()
        if this_rank() == 0:
            _take_one(model)
        else:
            with raises_soon(RankLeft):
                extracted(model, bucket_bytes=FEW_BYTES)
        extracted(model, bucket_bytes=FEW_BYTES)
        together()
        counts.append(private.default_store().num_keys())
        together()
    assert counts[-1] == counts[0], f"keys after each: {counts}"
