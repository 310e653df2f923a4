"""The cause among exceptions, deaths and closed connections is the verdict; the stage tells whose fault it is."""

import pytest
from support.rank_reports import BUSY, CLOSED, STAGES, WAITING, ended, failed, failure, fine, stopped

from fsdp_doctor.verdict.classification import (
    Verdict,
    classify,
    is_cascade,
)
from fsdp_doctor.verdict.records import RankReport

# Cause before cascade.


@pytest.mark.parametrize(
    "message",
    [
        CLOSED,
        "Connection reset by peer",
        "[Errno 32] Broken pipe",
        "Connection was closed by remote",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)",
        "Read error [127.0.0.1]:5000: Connection reset by peer",
    ],
)
@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (ended(1, "SIGSEGV", time=20.0), "died"),
        (ended(1, "SIGKILL", time=20.0, oom_killed=True), "oom"),
        (failed(1, "no such dtype", time=20.0), "crash"),
        (failed(1, "CUDA out of memory.", time=20.0), "oom"),
        (failed(1, "bad shape", stage="verify", time=20.0), "lost"),
        (RankReport(rank=1, garbled="{"), "lost"),
    ],
    ids=["death", "oom killer", "exception", "oom", "our fault", "garbled"],
)
def test_a_closed_connection_is_not_the_cause_while_another_rank_has_one(message, cause, kind):
    verdict = classify([failed(0, message, time=5.0), cause], 2)
    assert (verdict.kind, verdict.ranks) == (kind, (1,))
    assert any(message in also and "rank 0" in also for also in verdict.also)


def test_a_closed_connection_is_the_cause_if_no_better_cause_exists():
    verdict = classify([failed(0, CLOSED), fine(1)], 2)
    assert (verdict.kind, verdict.ranks) == ("crash", (0,))


@pytest.mark.parametrize(
    "cascade",
    [
        stopped(1, record={"failure": failure(CLOSED, time=60.5)}),
        failed(1, CLOSED, time=60.5),
        failed(1, "Timed out waiting 60000ms for recv operation to complete", stage="agree", time=60.5),
    ],
    ids=["stopped too", "done", "agreeing"],
)
def test_a_closed_connection_is_no_cause_while_another_rank_missed_the_deadline(cascade):
    verdict = classify([stopped(0, BUSY), cascade], 2)
    assert verdict.kind == "hang"
    assert 0 in verdict.ranks


def test_a_rank_that_failed_to_agree_is_not_the_cause():
    verdict = classify([failed(0, "Timed out", stage="agree", time=5.0), failed(1, "no such dtype", time=9.0)], 2)
    assert (verdict.kind, verdict.ranks) == ("crash", (1,))


@pytest.mark.parametrize(("message", "expected"), [(CLOSED, True), ("CONNECTION REFUSED", True), ("it broke", False)])
def test_a_cascade_is_known_by_its_message(message, expected):
    assert is_cascade(failure(message)) is expected


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_first_exception_by_time_is_the_cause(first):
    reports = [failed(rank, f"trouble {rank}", time=10.0 if rank == first else 30.0) for rank in range(3)]
    verdict = classify(reports, 3)
    assert verdict.ranks == (first,)
    assert verdict.reason == f"rank {first}: RuntimeError: trouble {first}"
    assert [also.split(" then: ")[0] for also in verdict.also] == [f"rank {r}" for r in range(3) if r != first]


def test_the_earlier_of_an_exception_and_a_death_is_the_cause():
    assert classify([failed(0, time=1.0), ended(1, time=2.0)], 2).kind == "crash"
    assert classify([failed(0, time=3.0), ended(1, time=2.0)], 2).kind == "died"


def test_a_failure_of_all_ranks_names_all_and_quotes_the_lowest_rank():
    reports = [failed(rank, f"mat2 is on cuda:{rank}, expected cpu", time=30.0 - rank) for rank in (2, 0, 1)]
    verdict = classify(reports, 3)
    assert verdict == Verdict(
        kind="crash", reason="RuntimeError: mat2 is on cuda:0, expected cpu", ranks=(0, 1, 2), also=()
    )


def test_a_failure_that_some_ranks_share_says_which():
    reports = [fine(0), failed(1, "on cuda:1", time=9.0), failed(2, "on cuda:2", time=8.0)]
    verdict = classify(reports, 3)
    assert (verdict.reason, verdict.ranks) == ("ranks 1, 2: RuntimeError: on cuda:1", (1, 2))


def test_only_the_first_line_of_a_message_is_the_reason():
    assert classify([failed(0, "\n first\nsecond")], 1).reason == "RuntimeError: first"


def test_an_exception_without_a_message_is_told_by_its_type():
    assert classify([failed(0, "", type="AssertionError")], 1).reason == "AssertionError"


def test_a_rank_stopped_because_of_other_ranks_is_shown_with_the_cause():
    verdict = classify([failed(0), stopped(1, WAITING, why="others")], 2)
    assert (verdict.kind, verdict.ranks) == ("crash", (0,))
    assert verdict.also == ("rank 1 waited in unshard",)


# The stage says whose fault it is.


_BY_STAGE = {
    "checkpoint": ("lost", "RuntimeError: it broke"),
    "build": ("crash", "build: RuntimeError: it broke"),
    "reference": ("lost", "RuntimeError: it broke"),
    "offload": ("crash", "offload: RuntimeError: it broke"),
    "staging": ("crash", "staging: RuntimeError: it broke"),
    "fingerprint": ("lost", "RuntimeError: it broke"),
    "extract": ("crash", "RuntimeError: it broke"),
    "save": ("crash", "RuntimeError: it broke"),
    "load": ("crash", "RuntimeError: it broke"),
    "verify": ("lost", "RuntimeError: it broke"),
    "agree": ("crash", "agree: RuntimeError: it broke"),
    "next step": ("poisoned", "RuntimeError: it broke"),
    "test": ("crash", "RuntimeError: it broke"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_stage_of_an_exception_decides_its_verdict(stage):
    verdict = classify([failed(0, stage=stage)], 1)
    assert (verdict.kind, verdict.reason) == _BY_STAGE[stage]
