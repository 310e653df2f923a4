"""Tests that a rank that raises, ends or hangs fails its check, and that the next check gets new ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from support.ranks import Groups, Setting, on_ranks, this_rank, world_size

_TWO = Setting("cpu", 2)
_planted = on_ranks(_TWO)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Groups]:
    groups = Groups(seconds_of_a_check=3)
    yield groups
    groups.end()


@_planted
def passes() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size() == 2


@_planted
def raises_on_rank_1_while_rank_0_waits() -> None:
    assert this_rank() == 0, "planted"
    dist.barrier()


@_planted
def ends_with_0_on_rank_1() -> None:
    if this_rank() == 1:
        os._exit(0)


@_planted
def comes_to_no_end() -> None:
    time.sleep(1000)


@_planted
def is_stopped_on_rank_1() -> None:
    if this_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


@_planted
def is_skipped() -> None:
    pytest.skip("planted")


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (raises_on_rank_1_while_rank_0_waits, r"rank 0: .*\nrank 1: Traceback[\s\S]*AssertionError: planted"),
        (ends_with_0_on_rank_1, r"rank 1: ended with exit code 0"),
        (comes_to_no_end, r"rank 0: ended with exit code 1[\s\S]*in comes_to_no_end"),
        (is_stopped_on_rank_1, r"rank 1: came to no end"),
    ],
)
def test_trouble_on_a_rank_fails_its_check_and_replaces_the_ranks(
    impatient: Groups, planted: object, words: str
) -> None:
    with pytest.raises(pytest.fail.Exception, match=words):
        impatient.run(_TWO, planted.on_rank)  # type: ignore[attr-defined]
    impatient.run(_TWO, passes.on_rank)


def test_a_check_that_the_ranks_skip_is_skipped(impatient: Groups) -> None:
    with pytest.raises(pytest.skip.Exception, match="planted"):
        impatient.run(_TWO, is_skipped.on_rank)
