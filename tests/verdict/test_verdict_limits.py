"""Exhausted memory and hangs: the rank to look at."""

import pytest
from support.rank_reports import (
    _OTHER_THREAD,
    BARRIER,
    BUSY,
    BUSY_FIRST,
    NO_FRAME,
    WAITING,
    WAITING_FIRST,
    WAITING_IN_DTENSOR,
    ended,
    failed,
    fine,
    record,
    stopped,
)

from fsdp_doctor.verdict.classification import (
    classify,
    find_wait,
)
from fsdp_doctor.verdict.records import RankReport

# Memory.


@pytest.mark.parametrize(
    "report",
    [
        failed(0, "CUDA out of memory. Tried to allocate 2.00 GiB.", type="OutOfMemoryError"),
        failed(0, "no words", type="OutOfMemoryError"),
        failed(0, "", type="MemoryError"),
        failed(0, "CUDA error: out of memory"),
        failed(0, "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
        failed(0, "[Errno 12] Cannot allocate memory", type="OSError"),
        failed(0, "std::bad_alloc"),
        failed(0, "CUDA out of memory.", stage="next step"),
        failed(0, "CUDA out of memory.", stage="build"),
        ended(0, "SIGKILL", oom_killed=True),
        RankReport(
            rank=0, record=record(done=False), stopped="memory", stopped_detail="held 9 MiB, the limit is 8 MiB"
        ),
    ],
    ids=["type", "type alone", "MemoryError", "cuda", "cpu", "mmap", "new", "next step", "build", "kernel", "our stop"],
)
def test_running_out_of_memory_is_oom_however_it_shows(report):
    verdict = classify([report, fine(1)], 2)
    assert (verdict.kind, verdict.ranks) == ("oom", (0,))


@pytest.mark.parametrize(
    "message", ["unknown option: on_out_of_memory", "a worker ran out of memory cards", "the out of memory policy"]
)
def test_the_words_alone_are_no_out_of_memory(message):
    assert classify([failed(0, message, type="ValueError"), fine(1)], 2).kind == "crash"


def test_a_sigkill_that_was_not_the_kernels_is_no_oom():
    assert classify([ended(0, "SIGKILL", oom_killed=False)], 1).kind == "died"


def test_the_kernels_killer_and_our_limit_are_told():
    assert "out-of-memory killer" in classify([ended(0, oom_killed=True)], 1).reason
    over = RankReport(rank=0, record=record(done=False), stopped="memory", stopped_detail="held 9 MiB")
    assert classify([over], 1).reason == "held 9 MiB"


# Hangs.


@pytest.mark.parametrize("stacks", [(BUSY, WAITING), (BUSY_FIRST, WAITING_FIRST), ("", WAITING)])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_hang_names_the_rank_that_waits_for_nobody(culprit, stacks):
    busy, waiting = stacks
    verdict = classify([stopped(rank, busy if rank == culprit else waiting) for rank in range(2)], 2)
    assert (verdict.kind, verdict.ranks) == ("hang", (culprit,))
    assert verdict.reason.startswith("not done after 60 s: ")
    assert f"rank {culprit} was busy" in verdict.reason
    assert f"rank {1 - culprit} waited in unshard" in verdict.reason


def test_a_rank_waiting_in_its_own_process_is_blamed_and_not_busy():
    locked = WAITING.replace("torch/distributed/distributed_c10d.py", "lib/python3.12/threading.py").replace(
        "all_gather_single", "wait"
    )
    verdict = classify([stopped(0, WAITING), stopped(1, locked)], 2)
    assert (verdict.kind, verdict.ranks) == ("hang", (1,))
    assert "rank 1 waited for no other rank" in verdict.reason


def test_a_hang_in_which_all_wait_names_all():
    assert classify([stopped(0, WAITING), stopped(1, WAITING)], 2).ranks == (0, 1)


def test_a_rank_that_waits_to_agree_is_not_blamed():
    verdict = classify([stopped(0, WAITING, stage="agree"), stopped(1, WAITING)], 2)
    assert (verdict.kind, verdict.ranks) == ("hang", (1,))
    assert "rank 0 waited in unshard (agree)" in verdict.reason


def test_a_hang_while_agreeing_names_all():
    verdict = classify([stopped(rank, WAITING, stage="agree") for rank in range(2)], 2)
    assert (verdict.kind, verdict.ranks) == ("hang", (0, 1))


@pytest.mark.parametrize("stage", ["extract", "agree"])
def test_a_stopped_process_is_blamed_although_its_stack_waits(stage):
    frozen = stopped(1, WAITING, stage=stage, process_state="was stopped by a signal")
    verdict = classify([stopped(0, WAITING), frozen], 2)
    assert (verdict.kind, verdict.ranks) == ("hang", (1,))
    assert "rank 1 was stopped by a signal" in verdict.reason


def test_a_hang_of_one_rank_among_finished_ranks_is_a_hang():
    verdict = classify([fine(0), stopped(1, WAITING)], 2)
    assert (verdict.kind, verdict.ranks) == ("hang", (1,))


def test_a_worker_that_we_ended_at_the_deadline_did_not_die():
    assert classify([stopped(0), stopped(1)], 2).kind == "hang"


@pytest.mark.parametrize(
    ("stack", "function"),
    [
        (WAITING, "unshard"),
        (WAITING_FIRST, "unshard"),
        (WAITING.replace("/venv/torch", "torch"), "unshard"),
        (BARRIER, "barrier"),
        (NO_FRAME, ""),
        (BUSY, ""),
        (BUSY_FIRST, ""),
        ("", ""),
        (_OTHER_THREAD, ""),
        ("Current thread 0x1 (most recent call first):\n  <no Python frame>\n", ""),
    ],
)
def test_the_collective_is_read_from_the_main_threads_innermost_frames(stack, function):
    assert find_wait(stack) == function


def test_a_rank_that_waits_for_a_tensor_in_dtensor_code_waits():
    assert find_wait(WAITING_IN_DTENSOR)
    assert classify([stopped(0, WAITING_IN_DTENSOR), stopped(1, BUSY)], 2).ranks == (1,)
