"""From what the ranks report to one verdict, one rule after the other."""

import dataclasses
import itertools
from typing import get_args

import pytest

from fsdp_doctor.verdict.classification import (
    NEUTRAL,
    Verdict,
    VerdictKind,
    classify,
    fold,
    is_cascade,
    waiting_in,
)
from fsdp_doctor.verdict.records import Failure, Problem, RankReport, Record, Stage

CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:39202"
STAGES = get_args(Stage)

# As faulthandler writes them: innermost frame first, the current thread last.
_OTHER_THREAD = """\
Thread 0x00007f00 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/venv/torch/distributed/elastic/heartbeat.py", line 20 in beat

"""
WAITING = (
    _OTHER_THREAD
    + """\
Current thread 0x00007f01 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 4394 in all_gather_single
  File "/venv/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/venv/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line 364 in foreach_all_gather
  File "/venv/torch/utils/_contextlib.py", line 124 in decorate_context
  File "/venv/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", line 407 in unshard
  File "/venv/fsdp_doctor/fsdp/paths_fsdp2.py", line 90 in unshard
"""
)
BUSY = (
    _OTHER_THREAD
    + """\
Current thread 0x00007f01 (most recent call first):
  File "/home/me/mine.py", line 7 in spin
  File "/venv/torch/distributed/distributed_c10d.py", line 83 in wrapper
  File "/venv/fsdp_doctor/examination.py", line 150 in _drain
"""
)
# The same, written in the other order: the current thread first.
BUSY_FIRST = "Current thread" + BUSY.split("Current thread")[1] + "\n" + _OTHER_THREAD
WAITING_FIRST = "Current thread" + WAITING.split("Current thread")[1] + "\n" + _OTHER_THREAD
BARRIER = """\
Current thread 0x00007f01 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/venv/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/mine.py", line 7 in wait
"""
NO_FRAME = """\
Current thread 0x00007f01 (most recent call first):
  <no Python frame>

Thread 0x00007f00 (most recent call first):
  File "/venv/torch/distributed/elastic/heartbeat.py", line 20 in beat
"""
WAITING_IN_DTENSOR = """\
Current thread 0x00007f01 (most recent call first):
  File "/venv/torch/_ops.py", line 882 in redispatch
  File "/venv/torch/_library/autograd.py", line 41 in forward_no_grad
  File "/venv/torch/_library/autograd.py", line 123 in autograd_impl
  File "/venv/torch/_ops.py", line 1279 in __call__
  File "/venv/torch/distributed/_functional_collectives.py", line 142 in wait_tensor
  File "/venv/torch/distributed/_functional_collectives.py", line 1122 in wait
  File "/venv/torch/distributed/tensor/_redistribute.py", line 1766 in redistribute_local_tensor
  File "/venv/torch/distributed/tensor/_redistribute.py", line 1918 in forward
  File "/venv/torch/autograd/function.py", line 625 in apply
  File "/venv/torch/distributed/tensor/_api.py", line 731 in redistribute
  File "/venv/torch/distributed/tensor/_api.py", line 774 in full_tensor
  File "/venv/fsdp_doctor/fsdp/paths_fsdp2.py", line 50 in to_full_tensor
"""


def record(stage="extract", *, done=True, failure=None, problems=(), unsupported=""):
    found = tuple(Problem(kind=kind, detail=detail) for kind, detail in problems)
    return Record(
        case_id="fsdp2/none/staged/dcp",
        stage=stage,
        failure=failure,
        problems=found,
        unsupported=unsupported,
        done=done,
    )


def failure(message="it broke", *, time=10.0, type="RuntimeError"):
    return Failure(type=type, message=message, traceback=f"Traceback\n{type}: {message}", time=time)


def fine(rank):
    return RankReport(rank=rank, record=record("next step"))


def failed(rank, message="it broke", *, stage="extract", time=10.0, type="RuntimeError", problems=()):
    return RankReport(
        rank=rank, record=record(stage, failure=failure(message, time=time, type=type), problems=problems)
    )


def found(rank, *problems, stage="next step"):
    return RankReport(rank=rank, record=record(stage, problems=problems))


def ended(rank, exit="SIGKILL", *, stage="extract", time=10.0, **fields):
    return RankReport(rank=rank, record=record(stage, done=False), exit=exit, exit_time=time, **fields)


def stopped(rank, stack=BUSY, *, stage="extract", why="deadline", **fields):
    detail = {"deadline": "not done after 60 s", "others": "still at it when another rank was in trouble"}[why]
    return RankReport(
        rank=rank,
        record=record(stage, done=False, **fields.pop("record", {})),
        stopped=why,
        stopped_detail=detail,
        exit_time=70.0,
        stack=stack,
        **fields,
    )


@pytest.mark.parametrize("kind", get_args(VerdictKind))
def test_only_ok_unsupported_and_skipped_are_not_bad(kind):
    assert Verdict(kind=kind).bad is (kind not in {"ok", "unsupported", "skipped"})
    assert (kind in NEUTRAL) is not Verdict(kind=kind).bad


# A missing record is never a pass.


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ok_is_when_every_rank_is_done_and_found_nothing(world_size):
    assert classify([fine(rank) for rank in range(world_size)], world_size) == Verdict(kind="ok")


@pytest.mark.parametrize(
    ("ranks", "missing", "words"),
    [
        ([], (0, 1, 2), "ranks 0, 1, 2"),
        ([0, 2], (1,), "rank 1"),
        ([1], (0, 2), "ranks 0, 2"),
    ],
)
def test_a_rank_without_a_report_is_lost_and_named(ranks, missing, words):
    verdict = classify([fine(rank) for rank in ranks], 3)
    assert (verdict.kind, verdict.ranks) == ("lost", missing)
    assert verdict.reason.endswith(words)


def test_a_missing_report_outranks_what_the_others_say():
    assert classify([failed(0)], 2).kind == "lost"


@pytest.mark.parametrize("stage", STAGES)
def test_a_record_that_is_not_done_is_never_a_pass_at_any_stage(stage):
    verdict = classify([fine(0), RankReport(rank=1, record=record(stage, done=False))], 2)
    assert (verdict.kind, verdict.ranks) == ("lost", (1,))


def test_a_report_without_a_record_is_never_a_pass():
    verdict = classify([RankReport(rank=0), fine(1)], 2)
    assert (verdict.kind, verdict.ranks) == ("lost", (0,))


@pytest.mark.parametrize("problems", [(), (("wrong", "w differs"),)])
def test_a_rank_that_was_stopped_for_the_sake_of_others_is_never_a_pass(problems):
    verdict = classify([fine(0), stopped(1, why="others", record={"problems": problems})], 2)
    assert (verdict.kind, verdict.ranks) == ("lost", (1,))


@pytest.mark.parametrize(
    "broken",
    [
        RankReport(rank=1),
        RankReport(rank=1, garbled="{"),
        dataclasses.replace(fine(1), garbled="{"),
        dataclasses.replace(fine(1), exit="SIGSEGV"),
        ended(1),
        ended(1, "exit code 0"),
        failed(1),
        failed(1, stage="verify"),
        failed(1, stage="agree"),
        failed(1, CLOSED),
        stopped(1),
        stopped(1, stage="agree"),
        stopped(1, why="others"),
        RankReport(rank=1, record=record(done=False), stopped="memory", stopped_detail="held 9 MiB"),
        found(1, ("leak", "1 byte")),
    ],
    ids=lambda report: (
        f"{report.exit}{report.stopped}{report.garbled}{report.record.stage if report.record else 'none'}"
    ),
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_broken_rank_is_enough_for_a_bad_verdict_that_names_it(broken, order):
    reports = [fine(0), broken]
    verdict = classify([reports[index] for index in order], 2)
    assert verdict.bad
    assert verdict.ranks == (1,)


# Exits and signals.


@pytest.mark.parametrize("exit", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "exit code 0", "exit code 3"])
def test_a_rank_that_ends_by_itself_died_and_the_reason_says_how(exit):
    verdict = classify([ended(0, exit), fine(1)], 2)
    assert verdict.kind == "died"
    assert verdict.reason == f"rank 0: ended with {exit}"


@pytest.mark.parametrize(
    ("report", "where"),
    [
        (ended(0, stage="build"), "(build)"),
        (ended(0, stage="next step"), "(next step)"),
        (RankReport(rank=0, exit="SIGKILL"), "before the case began"),
    ],
)
def test_a_death_outside_the_path_says_where(report, where):
    assert classify([report], 1).reason == f"ended with SIGKILL {where}"


def test_a_death_is_told_though_the_record_was_done():
    assert classify([dataclasses.replace(fine(0), exit="SIGSEGV", exit_time=3.0)], 1).kind == "died"


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


def test_a_closed_connection_is_the_cause_where_no_rank_has_a_better_one():
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
def test_a_closed_connection_is_not_the_cause_while_another_rank_did_not_end_before_the_deadline(cascade):
    verdict = classify([stopped(0, BUSY), cascade], 2)
    assert verdict.kind == "hang"
    assert 0 in verdict.ranks


def test_a_rank_that_could_not_agree_with_the_others_is_not_the_cause():
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


def test_an_exception_before_a_death_is_the_cause_and_a_death_before_an_exception_too():
    assert classify([failed(0, time=1.0), ended(1, time=2.0)], 2).kind == "crash"
    assert classify([failed(0, time=3.0), ended(1, time=2.0)], 2).kind == "died"


def test_a_failure_that_all_ranks_share_names_all_and_shows_the_lowest_ranks_text():
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


def test_a_rank_that_was_ended_for_the_sake_of_others_is_told_with_the_cause():
    verdict = classify([failed(0), stopped(1, WAITING, why="others")], 2)
    assert (verdict.kind, verdict.ranks) == ("crash", (0,))
    assert verdict.also == ("rank 1 waited in unshard",)


# The stage says whose fault it is.


@pytest.mark.parametrize(
    ("stage", "kind", "reason"),
    [
        ("build", "crash", "build: RuntimeError: it broke"),
        ("reference", "lost", "RuntimeError: it broke"),
        ("offload", "crash", "offload: RuntimeError: it broke"),
        ("staging", "crash", "staging: RuntimeError: it broke"),
        ("fingerprint", "lost", "RuntimeError: it broke"),
        ("extract", "crash", "RuntimeError: it broke"),
        ("verify", "lost", "RuntimeError: it broke"),
        ("agree", "crash", "agree: RuntimeError: it broke"),
        ("next step", "poisoned", "RuntimeError: it broke"),
    ],
)
def test_the_stage_of_an_exception_decides_its_verdict(stage, kind, reason):
    verdict = classify([failed(0, stage=stage)], 1)
    assert (verdict.kind, verdict.reason) == (kind, reason)


def test_the_table_of_stages_above_is_whole():
    marks = test_the_stage_of_an_exception_decides_its_verdict.pytestmark
    assert [row[0] for row in marks[0].args[1]] == list(STAGES)


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


def test_a_hang_in_which_all_wait_names_all():
    assert classify([stopped(0, WAITING), stopped(1, WAITING)], 2).ranks == (0, 1)


def test_a_rank_that_waits_to_agree_is_not_the_one_to_look_at():
    verdict = classify([stopped(0, WAITING, stage="agree"), stopped(1, WAITING)], 2)
    assert (verdict.kind, verdict.ranks) == ("hang", (1,))
    assert "rank 0 waited in unshard (agree)" in verdict.reason


def test_a_hang_while_agreeing_names_all():
    verdict = classify([stopped(rank, WAITING, stage="agree") for rank in range(2)], 2)
    assert (verdict.kind, verdict.ranks) == ("hang", (0, 1))


@pytest.mark.parametrize("stage", ["extract", "agree"])
def test_a_stopped_process_is_the_one_to_look_at_though_its_stack_waits(stage):
    frozen = stopped(1, WAITING, stage=stage, process_state="was stopped by a signal")
    verdict = classify([stopped(0, WAITING), frozen], 2)
    assert (verdict.kind, verdict.ranks) == ("hang", (1,))
    assert "rank 1 was stopped by a signal" in verdict.reason


def test_a_hang_of_one_rank_among_ranks_that_are_done_is_a_hang():
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
    assert waiting_in(stack) == function


def test_a_rank_that_waits_for_a_tensor_in_dtensor_code_waits():
    assert waiting_in(WAITING_IN_DTENSOR)
    assert classify([stopped(0, WAITING_IN_DTENSOR), stopped(1, BUSY)], 2).ranks == (1,)


# Garbled records.


def test_half_a_record_is_the_doctors_fault():
    verdict = classify([RankReport(rank=0, record=record(done=False), garbled='{"kind'), fine(1)], 2)
    assert (verdict.kind, verdict.ranks) == ("lost", (0,))
    assert '{"kind' in verdict.reason


@pytest.mark.parametrize("rank_of_death", [0, 1])
def test_half_a_record_is_no_fault_where_a_process_died(rank_of_death):
    garbled = RankReport(rank=0, record=record(done=False), garbled="{")
    if rank_of_death == 0:
        reports = [dataclasses.replace(garbled, exit="SIGSEGV", exit_time=9.0), fine(1)]
    else:
        reports = [garbled, ended(1, "SIGSEGV", time=9.0)]
    verdict = classify(reports, 2)
    assert (verdict.kind, verdict.ranks) == ("died", (rank_of_death,))


# Problems.

_ORDER = ("wrong", "incomplete", "misplaced", "poisoned", "leak")


@pytest.mark.parametrize("kind", _ORDER)
def test_a_problem_on_one_rank_is_the_verdict(kind):
    verdict = classify([fine(0), found(1, (kind, "layer.weight"))], 2)
    assert verdict == Verdict(kind=kind, reason="rank 1: layer.weight", ranks=(1,))


@pytest.mark.parametrize(("worse", "better"), list(itertools.combinations(_ORDER, 2)))
@pytest.mark.parametrize("swapped", [False, True])
def test_the_worse_problem_is_the_verdict_and_the_other_one_is_told(worse, better, swapped):
    reports = [found(0, (better, "b")), found(1, (worse, "w"))]
    verdict = classify(reports[::-1] if swapped else reports, 2)
    assert verdict == Verdict(kind=worse, reason="rank 1: w", ranks=(1,), also=(f"{better}: rank 0: b",))


def test_a_problem_that_all_ranks_share_is_told_once():
    verdict = classify([found(rank, ("misplaced", f"w is on cuda:{rank}")) for rank in range(3)], 3)
    assert verdict == Verdict(kind="misplaced", reason="w is on cuda", ranks=(0, 1, 2))


@pytest.mark.parametrize("kind", ["wrong", "incomplete", "misplaced"])
def test_a_bad_extraction_outranks_the_next_step_that_fails(kind):
    reports = [failed(rank, stage="next step", problems=((kind, "w"), ("leak", "l"))) for rank in range(2)]
    verdict = classify(reports, 2)
    assert (verdict.kind, verdict.reason, verdict.ranks) == (kind, "w", (0, 1))
    assert verdict.also == ("leak: l", "next training step: RuntimeError: it broke")


def test_a_next_step_that_fails_outranks_a_leak():
    verdict = classify([failed(0, stage="next step", problems=(("leak", "l"),))], 1)
    assert (verdict.kind, verdict.also) == ("poisoned", ("leak: l",))


def test_a_crash_outranks_a_bad_extraction_and_both_are_told():
    verdict = classify([failed(0), found(1, ("wrong", "w"))], 2)
    assert (verdict.kind, verdict.ranks) == ("crash", (0,))
    assert "wrong: rank 1: w" in verdict.also


# Unsupported.


def test_what_cannot_be_built_is_unsupported_with_each_reason_once():
    reports = [RankReport(rank=rank, record=record("build", unsupported="needs a mesh")) for rank in range(2)]
    assert classify(reports, 2) == Verdict(kind="unsupported", reason="needs a mesh")


@pytest.mark.parametrize(
    ("other", "kind"),
    [(ended(1), "died"), (failed(1), "crash"), (stopped(1), "hang"), (RankReport(rank=1), "lost")],
    ids=["death", "exception", "hang", "nothing"],
)
def test_unsupported_on_one_rank_hides_no_trouble_on_another(other, kind):
    verdict = classify([RankReport(rank=0, record=record("build", unsupported="needs a mesh")), other], 2)
    assert (verdict.kind, verdict.ranks) == (kind, (1,))


def test_an_exception_beside_unsupported_is_no_crash():
    report = RankReport(rank=0, record=record("build", unsupported="needs a mesh", failure=failure()))
    assert classify([report], 1).kind == "unsupported"


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("on cuda:3 and cuda:12", "on cuda and cuda"),
        ("device(type='cuda', index=1)", "device(type='cuda')"),
        ("xpu:0, npu:1", "xpu, npu"),
        ("cuda:", "cuda:"),
        ("layers:3 mycuda:1 rank 2", "layers:3 mycuda:1 rank 2"),
    ],
)
def test_folding_takes_device_indices_away_and_nothing_else(text, folded):
    assert fold(text) == folded
