"""Ctrl-C while a rank waits for the others, and calls of two threads: each rank is told, and the next call works."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

from support.extraction import (
    FEW_BYTES,
    assert_same,
    everywhere,
    extracted,
    fsdp2,
    new_net,
    raises_soon,
)
from support.ranks import Setting, accelerator, device_type, on_ranks, this_rank, together

from fsdp_doctor import PlanMismatch, RankLeft, full_tensors
from fsdp_doctor.extract import agreement

everyone = on_ranks(Setting("emulated", 2), Setting("cpu", 3))


@everyone
def test_ctrl_c_while_a_rank_waits_for_the_others_ends_the_call_on_every_rank() -> None:
    model = fsdp2(new_net())
    expected = extracted(model)
    wait, come = agreement.Agreement._wait, agreement.Agreement._came_to_stage
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
                mock.patch.object(agreement.Agreement, "_came_to_stage", late),
                raises_soon(RankLeft, "rank 0 left", "KeyboardInterrupt"),
            ):
                extracted(model, bucket_bytes=FEW_BYTES)
        assert_same(extracted(model), expected)


@everyone
def test_ctrl_c_after_the_others_went_on_is_heeded_when_the_promise_is_kept() -> None:
    """The others have gathered what all gave their word for by then."""
    model = fsdp2(new_net())
    expected = extracted(model)
    wait, come = agreement.Agreement._wait, agreement.Agreement._came_to_stage
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
    with mock.patch.multiple(agreement.Agreement, **(first if this_rank() == 0 else {"_came_to_stage": last})):
        if this_rank() == 0:
            with raises_soon(KeyboardInterrupt):
                extracted(model, bucket_bytes=FEW_BYTES)
        else:
            with raises_soon(RankLeft, "rank 0 left after 3 buckets", "KeyboardInterrupt"):
                extracted(model, bucket_bytes=FEW_BYTES)
    assert_same(extracted(model), expected)


@everyone
def test_without_a_thread_to_wait_in_a_call_works_as_ever() -> None:
    model = fsdp2(new_net())
    expected = extracted(model)
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
    model = fsdp2(new_net())
    expected = extracted(model)
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
    """Whichever comes first, on each rank another: all of it, or a sentence."""
    model = fsdp2(new_net())
    expected = extracted(model)
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
