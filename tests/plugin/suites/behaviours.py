"""Tests that a run of pytest under test runs: on ranks, and each ends in a way of its own."""

from __future__ import annotations

import os
import signal
import threading
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2, timeout=20)


@pytest.fixture(scope="module")
def of_module() -> Iterator[int]:
    print("of_module is set up")
    yield os.getpid()
    print("of_module is torn down")


@pytest.fixture
def doubled(this_rank: Any) -> int:
    return 2 * this_rank.rank


def test_passes(this_rank: Any, doubled: int, of_module: int) -> None:
    assert doubled == 2 * dist.get_rank()
    assert of_module == os.getpid()
    ones = torch.ones(3, device=this_rank.device)
    dist.all_reduce(ones)
    assert ones.tolist() == [2.0, 2.0, 2.0]


def test_is_run_by_the_same_process(of_module: int) -> None:
    assert of_module == os.getpid()


def test_has_directories(this_rank: Any, tmp_path: Any) -> None:
    (this_rank.scratch / str(this_rank.rank)).touch()
    this_rank.barrier()
    assert sorted(file.name for file in this_rank.scratch.iterdir()) == ["0", "1"]
    (tmp_path / "mine").touch()
    assert len(list(tmp_path.iterdir())) == 1


def test_captures(capsys: pytest.CaptureFixture[str]) -> None:
    print("for the test alone")
    assert capsys.readouterr().out == "for the test alone\n"


@pytest.fixture
def raises_on_rank_1(this_rank: Any) -> None:
    if this_rank.rank == 1:
        raise ValueError("planted in a fixture")


def test_has_a_failing_fixture(raises_on_rank_1: None) -> None: ...


def test_asserts_on_rank_1(this_rank: Any) -> None:
    print(f"said by rank {this_rank.rank}")
    values = [1, 2, 3 + this_rank.rank]
    assert values == [1, 2, 3]


def test_asserts_on_all() -> None:
    assert {"a": 1} == {"a": 2}


def test_raises_with_its_device(this_rank: Any) -> None:
    raise RuntimeError(f"broken on cuda:{this_rank.rank}")


def test_raises_in_torch_with_other_values_on_each_rank(this_rank: Any) -> None:
    _calls_torch([torch.full((3,), float(this_rank.rank))] * 5)


def _calls_torch(outputs: list[torch.Tensor]) -> None:
    dist.all_gather(outputs, torch.ones(3))


def test_raises_deep_down_otherwise_on_each_rank(this_rank: Any) -> None:
    _goes_down(20, ("first", "second")[this_rank.rank])


def _goes_down(depth: int, message: str) -> None:
    if not depth:
        raise ValueError(message)
    _goes_down(depth - 1, message)


def test_stops_in_a_debugger() -> None:
    breakpoint()


def test_leaves_a_thread_on_rank_1(this_rank: Any) -> None:
    if this_rank.rank == 1:
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def test_exits(this_rank: Any) -> None:
    print(f"last words of rank {this_rank.rank}", flush=True)
    if this_rank.rank == 1:
        os._exit(3)
    dist.barrier()


def test_is_killed(this_rank: Any) -> None:
    if this_rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_calls_sys_exit(this_rank: Any) -> None:
    raise SystemExit(0)


@pytest.mark.ranks(2, timeout=3)
def test_hangs(this_rank: Any) -> None:
    print(f"rank {this_rank.rank} before the barrier", flush=True)
    if this_rank.rank == 0:
        dist.barrier()
    else:
        _waits_elsewhere()


def _waits_elsewhere() -> None:
    signal.pause()


def test_leaves_a_collective_unmatched(this_rank: Any) -> None:
    dist.all_reduce(torch.full((4,), 5.0, device=this_rank.device), async_op=True) if this_rank.rank == 0 else None


def test_skips() -> None:
    pytest.skip("for a reason")


def test_skips_on_rank_1(this_rank: Any) -> None:
    if this_rank.rank == 1:
        pytest.skip("for a reason of its own")


@pytest.mark.xfail(reason="known")
def test_is_expected_to_fail(this_rank: Any) -> None:
    assert this_rank.rank == 0


@pytest.mark.xfail(reason="known", strict=True)
def test_is_expected_to_fail_and_passes() -> None: ...


@pytest.mark.ranks(3, device="cpu")
def test_has_three_ranks_on_the_cpu(this_rank: Any) -> None:
    assert (this_rank.world_size, this_rank.device.type) == (3, "cpu")


@pytest.mark.ranks("two")
def test_has_no_number_of_ranks() -> None: ...


@pytest.mark.ranks(2, device="tpu")
def test_has_an_unknown_device() -> None: ...


def test_has_no_scenario(fsdp_case: Any) -> None: ...


class TestInAClass:
    def setup_method(self) -> None:
        self.rank = dist.get_rank()

    def test_is_a_method(self, this_rank: Any) -> None:
        assert self.rank == this_rank.rank


class TestOfUnittest(unittest.TestCase):
    def test_is_of_unittest(self) -> None: ...


def test_kills_its_supervisor(this_rank: Any) -> None:
    if this_rank.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def test_passes_after_all_that(of_module: int) -> None:
    assert of_module == os.getpid()
