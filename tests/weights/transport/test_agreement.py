"""Ranks that leave, come late, are interrupted or disagree: all are told soon, and nothing is left behind."""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.extraction import (
    FEW_BYTES,
    INTEGERS,
    Many,
    adapted,
    assert_same,
    everywhere,
    extracted,
    fsdp1,
    fsdp2,
    mesh_over,
    new_net,
    on_the_device,
    plan_for,
    raised_by,
    raises_soon,
    shard_qwen2,
    sharded_net,
    take_some,
)
from support.ranks import Setting, accelerator, device_type, on_ranks, this_device, this_rank, together, world_size
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdp_doctor import PlanMismatch, RankLeft, full_tensors
from fsdp_doctor.weights.extract import full
from fsdp_doctor.weights.extract.full import extract
from fsdp_doctor.weights.extract.plan import Arguments, get_plan
from fsdp_doctor.weights.fsdp import private
from fsdp_doctor.weights.transport import agreement


def _take_one(tensors: Any) -> None:
    for _ in tensors:
        break


def _raise_after_one(tensors: Any) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in tensors:
            raise ZeroDivisionError


def _drop_unstarted(tensors: Any) -> None:
    del tensors


def _close_after_one(tensors: Any) -> None:
    next(tensors)
    tensors.close()


@everywhere
def test_when_a_rank_leaves_the_others_are_told_which() -> None:
    leaver = world_size() - 1
    for model, nbytes in ((fsdp2(new_net()), FEW_BYTES), (fsdp1(new_net(empty=False)), 64 << 10)):
        expected = extracted(model)
        for leave in (_take_one, _raise_after_one, _drop_unstarted, _close_after_one):
            together()
            if this_rank() == leaver:
                leave(full_tensors(model, bucket_bytes=nbytes))
            else:
                with raises_soon(RankLeft, f"rank {leaver} left"):
                    extracted(model, bucket_bytes=nbytes)
            assert_same(extracted(model), expected)


@on_ranks(Setting("emulated", 2), Setting("cpu", 4))
def test_while_a_consumers_error_is_handled_no_rank_waits_for_its_buckets() -> None:
    """The handler's collective would be waited for by ranks that wait for what this one promised."""
    leaver = world_size() - 1
    for model, nbytes in ((fsdp2(new_net()), FEW_BYTES), (fsdp1(new_net(empty=False)), 64 << 10)):
        for first in (0, 1, 5):
            with (
                pytest.raises(ZeroDivisionError if this_rank() == leaver else RankLeft) as caught,
                full_tensors(model, bucket_bytes=nbytes) as tensors,
            ):
                take_some(tensors, first if this_rank() == leaver else None)
            dist.barrier()
            assert caught.tb is not None
            assert not list(tensors)


@on_ranks(Setting("emulated", 2), Setting("cpu", 3))
def test_in_step_gathers_a_bucket_after_every_rank_used_the_previous_bucket() -> None:
    model, nbytes = fsdp2(new_net()), 1 << 10
    expected = extracted(model)
    store = private.find_default_store()
    plan, _ = get_plan(model, Arguments.check(bucket_bytes=nbytes, in_step=True))
    ends = [0, *(bucket.end for bucket in plan.buckets)]
    assert len(ends) > 4
    num_gathered, used = 0, None
    gather = full.launch_all_gathers

    def noted_gather(transfers: Any) -> None:
        nonlocal num_gathered
        asked = [store.add(f"in_step/{rank}", 0) for rank in range(world_size())]
        assert min(asked) >= ends[num_gathered], (asked, num_gathered)
        assert used is None or used.query()
        num_gathered += 1
        gather(transfers)

    found = {}
    with mock.patch.object(full, "launch_all_gathers", noted_gather):
        tensors = extract(model, Arguments.check(bucket_bytes=nbytes, in_step=True))
        for spec, tensor in tensors:
            found |= dict.fromkeys(spec.names, tensor)
            if device_type() != "cpu":
                accelerator()._sleep(2_000_000)
                used = accelerator().current_stream().record_event()
            store.add(f"in_step/{this_rank()}", 1)
    assert num_gathered == len(plan.buckets)
    assert_same(found, expected)


@on_ranks(Setting("cpu", 4))
def test_under_hsdp_a_rank_that_leaves_stops_its_own_replica_only() -> None:
    model, expected = sharded_net(mesh_over(2, 2))
    together()
    if this_rank() == 1:
        _take_one(full_tensors(model, bucket_bytes=FEW_BYTES))
    elif this_rank() == 0:
        with raises_soon(RankLeft, "rank 1 left"):
            extracted(model, bucket_bytes=FEW_BYTES)
    else:
        assert_same(extracted(model, bucket_bytes=FEW_BYTES), expected)
    assert_same(extracted(model), expected)


@everywhere
def test_when_the_extraction_fails_on_a_rank_the_others_are_told_which() -> None:
    """A shard that is not as long as it must be is found when its bucket is loaded."""
    model, expected = sharded_net()
    whole = model.large.weight._local_tensor
    if this_rank() == 1:
        model.large.weight._local_tensor = whole[:-1]
    with raised_by(1, RuntimeError, "large.weight", "elements, but its placements give it"):
        extracted(model, bucket_bytes=FEW_BYTES)
    model.large.weight._local_tensor = whole
    assert_same(extracted(model), expected)


@everywhere
def test_ranks_with_different_arguments_all_raise_plan_mismatch() -> None:
    model, expected = sharded_net()
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
    """The other ranks wait as long as the store does."""
    model, expected = sharded_net()
    late = world_size() - 1
    if this_rank() == late:
        together()
    words = (f" in time (rank {late} did not), and", "make the call, and iterate to its end, on every rank")
    with (
        raises_soon(RankLeft, f"only {late} of {world_size()} ranks came to call", *words),
        mock.patch.object(agreement, "_SECONDS_BEFORE_NOTE", 0.1),
        mock.patch.object(agreement, "_SECONDS_OF_A_WAIT", 0.1),
    ):
        _impatiently_extracted(model)
    if this_rank() != late:
        together()
    assert_same(extracted(model), expected)


def _impatiently_extracted(model: nn.Module) -> None:
    store = agreement.connect(private.find_default_store())
    usual = store.timeout
    store.set_timeout(datetime.timedelta(seconds=1))
    try:
        extracted(model)
    finally:
        store.set_timeout(usual)


@everywhere
def test_one_of_the_ranks_that_wait_long_warns_about_the_missing_rank() -> None:
    model, expected = sharded_net()
    late, printed = world_size() - 1, io.StringIO()
    made = agreement._num_agreements[tuple(range(world_size()))]
    store = agreement.connect(private.find_default_store())
    keys = store.num_keys()
    together()
    if this_rank() == late:
        for rank in range(late):
            private.find_default_store().wait([f"test/warned/{rank}"])
    note = agreement.Agreement._note_wait

    def noted(self: Any, seconds: float) -> None:
        note(self, seconds)
        if self._has_warned:
            private.find_default_store().clone().set(f"test/warned/{this_rank()}", "")

    with (
        mock.patch.object(agreement, "_SECONDS_BEFORE_NOTE", 0.1),
        mock.patch.object(agreement, "_SECONDS_BEFORE_WARNING", 3),
        mock.patch.object(agreement.Agreement, "_note_wait", noted),
        contextlib.redirect_stderr(printed),
    ):
        assert_same(extracted(model), expected)
    together()
    for rank in range(late) if this_rank() == 0 else ():
        store.delete_key(f"test/warned/{rank}")
    together()
    ranks = list(range(world_size()))
    call = f"call {made + 1} over ranks {ranks}"
    words = f" s for rank {late} to come to {call}, and still waits: every rank must make the call"
    lines = printed.getvalue().splitlines()
    assert len(lines) == (1 if this_rank() == 0 else 0), lines
    assert all(line.startswith("fsdp-doctor: rank 0 has waited ") and line.endswith(words) for line in lines), lines
    assert_same(extracted(model), expected)
    together()
    assert store.num_keys() <= keys + 4


@everywhere
def test_a_rank_that_calls_once_more_is_told_both_numbers() -> None:
    """The other ranks are told at their next call, without a wait; the one after it is in step again."""
    model, expected = sharded_net()
    assert_same(extracted(model), expected)
    ranks = tuple(range(world_size()))
    made = agreement._num_agreements[ranks]
    words = (f"only 1 of {world_size()} ranks came to call {made + 1} ", f"have come to {made} at most")
    if this_rank() != 0:
        together()
    with raises_soon(RankLeft, *words):
        _impatiently_extracted(model)
    if this_rank() == 0:
        together()
    assert_same(extracted(model), expected)


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


def _of_one_bucket(model: nn.Module) -> None:
    extracted(model)


def _of_many_buckets(model: nn.Module) -> None:
    extracted(model, bucket_bytes=FEW_BYTES)


def _that_fails_and_one_after_it(model: nn.Module) -> None:
    if this_rank() == 0:
        _take_one(full_tensors(model, bucket_bytes=FEW_BYTES))
    else:
        with raises_soon(RankLeft):
            extracted(model, bucket_bytes=FEW_BYTES)
    extracted(model, bucket_bytes=FEW_BYTES)


@everywhere
def test_extractions_leave_no_keys_in_the_store() -> None:
    model = fsdp2(new_net())
    for extraction in (_of_one_bucket, _of_many_buckets, _that_fails_and_one_after_it):
        counts = []
        for _ in range(8):
            together()
            extraction(model)
            together()
            counts.append(private.find_default_store().num_keys())
        assert counts[-1] == counts[0], f"{extraction.__name__}: keys after each: {counts}"


on_four = on_ranks(Setting("emulated", 2), Setting("cpu", 4))


TINY_BYTES = 128


def num_buckets(model: nn.Module, bucket_bytes: int = TINY_BYTES) -> int:
    return len(plan_for(model, bucket_bytes).buckets)


def _builds() -> Iterator[tuple[nn.Module, int]]:
    """(model, bytes of a bucket of which it has some ten)."""
    yield fsdp2(new_net()), TINY_BYTES
    for use_orig_params in (True, False):
        yield FullyShardedDataParallel(Many(), device_id=this_device(), use_orig_params=use_orig_params), 1 << 16


@on_four
def test_a_consumer_that_raises_at_any_tensor_leaves_no_rank_waiting() -> None:
    leaver = world_size() - 1
    for model, nbytes in _builds():
        expected = extracted(model)
        assert num_buckets(model, nbytes) > 8
        for place in (0, 1, len(expected) // 2, len(expected) - 1):
            together()
            with raises_soon(ZeroDivisionError if this_rank() == leaver else RankLeft, *_said(leaver)):
                for index, (name, tensor) in enumerate(full_tensors(model, bucket_bytes=nbytes)):
                    assert torch.equal(tensor.cpu(), expected[name].cpu()), name
                    if this_rank() == leaver and index == place:
                        raise ZeroDivisionError
            assert_same(extracted(model, bucket_bytes=nbytes), expected)


def _said(leaver: int) -> tuple[str, ...]:
    return () if this_rank() == leaver else (f"rank {leaver} left after ", "its caller stopped")


@on_four
def test_any_bucket_that_fails_on_one_rank_leaves_no_rank_waiting() -> None:
    """Covers a device without more memory: it is asked for once more, for the others' sake."""
    leaver = world_size() - 1
    model, expected = sharded_net()
    buckets = num_buckets(model)
    for place in (0, buckets // 2, buckets - 1):
        together()
        failing = _fails_once_at(place) if this_rank() == leaver else contextlib.nullcontext()
        with failing, raised_by(leaver, torch.OutOfMemoryError, "no more"):
            extracted(model, bucket_bytes=TINY_BYTES)
        assert_same(extracted(model, bucket_bytes=TINY_BYTES), expected)


def _fails_once_at(place: int) -> Any:
    load, count = full.Pipeline._load, 0

    def failing(self: Any, bucket: Any) -> None:
        nonlocal count
        count += 1
        if count == place + 1:
            raise torch.OutOfMemoryError("there is no more")
        load(self, bucket)

    return mock.patch.object(full.Pipeline, "_load", failing)


@on_the_device
def test_a_rank_that_leaves_while_adapters_are_merged_leaves_no_rank_waiting() -> None:
    pytest.importorskip("peft")
    model = shard_qwen2(adapted())
    expected = extracted(model)
    for place in (0, 7, len(expected) - 1):
        together()
        with raises_soon(ZeroDivisionError if this_rank() == 1 else RankLeft, *_said(1)):
            for index, _ in enumerate(full_tensors(model, bucket_bytes=1 << 16)):
                if this_rank() == 1 and index == place:
                    raise ZeroDivisionError
        assert_same(extracted(model), expected)


@on_the_device
def test_a_rank_short_of_memory_promises_one_bucket_at_a_time() -> None:
    model, expected = sharded_net()
    promised = []
    promise = agreement.Agreement.promise

    def noted(self: Any, num_buckets: int, *, one_only: bool) -> int:
        promised.append(promise(self, num_buckets, one_only=one_only))
        return promised[-1]

    def without_room(self: Any, buckets: Any) -> None:
        if buckets and this_rank() == 0:
            raise torch.OutOfMemoryError("there is no more")

    with mock.patch.object(agreement.Agreement, "promise", noted):
        with mock.patch.object(full.Pipeline, "_keep_spare", without_room):
            assert_same(extracted(model, bucket_bytes=TINY_BYTES), expected)
        assert promised == [1] * num_buckets(model)
        promised.clear()
        assert_same(extracted(model, bucket_bytes=TINY_BYTES), expected)
        assert promised[:3] == [1, 2, 4]


@on_the_device
def test_a_call_asks_the_store_only_a_few_times_despite_many_buckets() -> None:
    model = fsdp2(new_net())
    extracted(model, bucket_bytes=TINY_BYTES)
    buckets = num_buckets(model)
    requests = []
    store = agreement.connect(agreement.private.find_default_store())

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: (requests.append(name), getattr(store, name)(*arguments))[1]

    with mock.patch.object(agreement, "connect", return_value=Counting()):
        extracted(model, bucket_bytes=TINY_BYTES)
    # Two for each window and for the end, what the rank that comes first deletes, and the asking before a thread waits.
    assert len(requests) <= 8 * (buckets.bit_length() + 1) + 4, requests


@on_the_device
def test_a_thread_waits_only_for_ranks_that_do_not_come_soon() -> None:
    model, expected = sharded_net()
    answered = mock.patch.object(agreement.Agreement, "_is_answered_soon", return_value=True)
    with mock.patch.object(agreement, "call_interruptibly") as waiting, answered:
        assert_same(extracted(model), expected)
    assert not waiting.called
    come = agreement.Agreement._come_to_stage

    def late(self: Any, one_only: bool) -> int:
        if this_rank() == 1 and not self._stage:
            together()
        return come(self, one_only)

    def waited(wait: Any, note: Any) -> Any:
        if this_rank() == 0 and waiting.call_count == 1:
            together()
        return wait()

    with (
        mock.patch.object(agreement.Agreement, "_come_to_stage", late),
        mock.patch.object(agreement, "call_interruptibly", side_effect=waited) as waiting,
    ):
        # Rank 1 comes to the first stage once rank 0 has begun to wait in a thread.
        assert_same(extracted(model), expected)


@on_ranks(Setting("cpu", 3), last_of_its_ranks=True)
def test_without_its_store_a_call_ends_in_a_sentence() -> None:
    model = fsdp2(new_net())
    extracted(model)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    del server
    with (
        mock.patch.object(agreement, "connect", return_value=client),
        raises_soon(RankLeft, "the process with the process group's store has ended, or cannot be reached"),
    ):
        extracted(model)


@everywhere
def test_ctrl_c_while_a_rank_waits_ends_the_call_on_every_rank() -> None:
    model, expected = sharded_net()
    # What the ranks compare once for a plan would be a stage of its own.
    extracted(model, bucket_bytes=FEW_BYTES)
    wait, come = agreement.Agreement._wait, agreement.Agreement._come_to_stage
    for stage in (0, 1, 2):

        def interrupted(self: Any, stage: int = stage) -> bytes:
            if self._stage == stage:
                os.kill(os.getpid(), signal.SIGINT)
            return wait(self)

        def late(self: Any, one_only: bool, stage: int = stage) -> int:
            if self._stage == stage:
                together()
            return come(self, one_only)

        if this_rank() == 0:
            with mock.patch.object(agreement.Agreement, "_wait", interrupted), raises_soon(KeyboardInterrupt):
                extracted(model, bucket_bytes=FEW_BYTES)
            together()
        else:
            with (
                mock.patch.object(agreement.Agreement, "_come_to_stage", late),
                raises_soon(RankLeft, "rank 0 left", "KeyboardInterrupt"),
            ):
                extracted(model, bucket_bytes=FEW_BYTES)
        assert_same(extracted(model), expected)


@everywhere
def test_ctrl_c_takes_effect_after_promises_to_continuing_ranks_are_kept() -> None:
    """The others have gathered what all had promised by then."""
    model, expected = sharded_net()
    # What the ranks compare once for a plan would be a stage of its own.
    extracted(model, bucket_bytes=FEW_BYTES)
    wait, come = agreement.Agreement._wait, agreement.Agreement._come_to_stage
    answer_with, is_heeded = agreement.Agreement._answer_with, threading.Event()

    def interrupted(self: Any) -> bytes:
        if self._stage != 1:
            return wait(self)
        together()
        answer = wait(self)
        os.kill(os.getpid(), signal.SIGINT)
        is_heeded.wait()
        return answer

    def heeded(self: Any, answer: str) -> str:
        is_heeded.set()
        return answer_with(self, answer)

    def last(self: Any, one_only: bool) -> int:
        if self._stage == 1:
            together()
        return come(self, one_only)

    first = {"_wait": interrupted, "_answer_with": heeded}
    with mock.patch.multiple(agreement.Agreement, **(first if this_rank() == 0 else {"_come_to_stage": last})):
        if this_rank() == 0:
            with raises_soon(KeyboardInterrupt):
                extracted(model, bucket_bytes=FEW_BYTES)
        else:
            with raises_soon(RankLeft, "rank 0 left after 3 buckets", "KeyboardInterrupt"):
                extracted(model, bucket_bytes=FEW_BYTES)
    assert_same(extracted(model), expected)


@everywhere
def test_without_a_thread_to_wait_in_a_call_works_as_ever() -> None:
    model, expected = sharded_net()
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        assert_same(extracted(model), expected)


# Threads


def _in_a_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        if device_type() != "cpu":
            accelerator().set_device(this_rank())
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


@everywhere
def test_a_call_beside_one_of_another_thread_is_refused_on_every_rank() -> None:
    model, expected = sharded_net()
    first = iter(full_tensors(model, bucket_bytes=FEW_BYTES))
    tensors = dict([next(first)])
    thread, found = _in_a_thread(lambda: extracted(model))
    thread.join()
    assert isinstance(found[0], RankLeft | RuntimeError), found
    assert "another thread" in str(found[0])
    tensors |= dict(first)
    assert_same(tensors, expected)
    thread, found = _in_a_thread(lambda: extracted(model))
    thread.join()
    assert_same(found[0], expected)


@everywhere
def test_calls_that_two_threads_begin_at_once_end_on_every_rank() -> None:
    """The order of the calls differs between the ranks: each call gives everything, or a sentence."""
    model, expected = sharded_net()
    for _ in range(2):
        together()
        calls = [_in_a_thread(lambda: extracted(model, bucket_bytes=FEW_BYTES)) for _ in range(2)]
        for thread, found in calls:
            thread.join()
            if isinstance(found[0], Exception):
                assert isinstance(found[0], RankLeft | PlanMismatch) or "another thread" in str(found[0])
            else:
                assert_same(found[0], expected)
        together()
    assert_same(extracted(model), expected)
