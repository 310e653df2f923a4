"""The verdict from what the ranks say: a missing record is never a pass, the worst problem is told."""

import dataclasses
import itertools
from typing import get_args

import pytest
from support.rank_reports import (
    CLOSED,
    STAGES,
    ended,
    failed,
    failure,
    fine,
    found,
    record,
    stopped,
)

from fsdp_doctor.verdict.classification import (
    GOOD,
    NOT_RUN,
    Verdict,
    VerdictKind,
    are_workers_whole,
    classify,
    fold,
    judge_refusal,
)
from fsdp_doctor.verdict.records import Failure, Problem, RankReport


@pytest.mark.parametrize("kind", get_args(VerdictKind))
def test_a_verdict_is_bad_unless_it_is_good_or_not_run(kind):
    assert Verdict(kind=kind).bad is (kind not in {"ok", "refused", "unsupported", "skipped"})
    assert (kind in GOOD | NOT_RUN) is not Verdict(kind=kind).bad
    assert not GOOD & NOT_RUN


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
def test_an_unfinished_record_never_passes_at_any_stage(stage):
    verdict = classify([fine(0), RankReport(rank=1, record=record(stage, done=False))], 2)
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


# Refusals.


def _refusing(rank, **fields):
    said = {"refusal": "KeyError: 'extra'", "done": True, **fields}
    done = dataclasses.replace(failed(rank, stage="load").record, **said)
    return RankReport(rank=rank, record=done)


def test_what_every_rank_refused_is_refused_and_its_workers_go_on():
    reports = [_refusing(0), _refusing(1)]
    assert classify(reports, 2) == Verdict(kind="refused", reason="KeyError: 'extra'")
    assert are_workers_whole(reports)


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (failed(1, stage="load"), "crash"),
        (fine(1), "crash"),
        (dataclasses.replace(_refusing(1), exit="SIGSEGV", exit_time=3.0), "died"),
        (_refusing(1, problems=(Problem(kind="poisoned", detail="a wrong sum"),)), "crash"),
        (_refusing(1, done=False), "crash"),
        (dataclasses.replace(_refusing(1), stopped="deadline", stopped_detail="not done"), "crash"),
        (dataclasses.replace(_refusing(1), garbled="{"), "crash"),
        (RankReport(rank=1), "crash"),
    ],
    ids=["an exception", "a load", "a death", "a problem", "not done", "stopped", "garbled", "nothing"],
)
def test_it_is_no_refusal_where_one_rank_did_something_else(other, kind):
    assert classify([_refusing(0), other], 2).kind == kind


@pytest.mark.parametrize("kind", get_args(VerdictKind))
def test_a_refusal_is_worth_what_the_method_makes_of_the_exact_checkpoint(kind):
    refusal = Verdict(kind="refused", reason="KeyError: 'extra'")
    verdict = judge_refusal(refusal, Verdict(kind=kind, reason="of the exact one"), 2)
    if kind in {"ok", "refused"}:
        assert verdict == refusal
        return
    assert verdict.kind == (kind if kind in {"unsupported", "skipped", "lost"} else "crash")
    assert (verdict.reason, verdict.ranks) == (refusal.reason, (0, 1))
    (also,) = verdict.also
    assert also.endswith(f"{kind}: of the exact one")


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
def test_a_death_outside_the_method_says_where(report, where):
    assert classify([report], 1).reason == f"ended with SIGKILL {where}"


def _in_the_second_call(report):
    return dataclasses.replace(report, record=dataclasses.replace(report.record, call=2))


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (ended(0), "ended with SIGKILL (the second call)"),
        (ended(0, stage="offload"), "ended with SIGKILL (the second call: offload)"),
        (failed(0), "the second call: RuntimeError: it broke"),
        (failed(0, stage="offload"), "the second call: offload: RuntimeError: it broke"),
        (stopped(0), "not done after 60 s: rank 0 was busy (the second call)"),
    ],
)
def test_what_goes_wrong_in_the_second_call_says_so(report, reason):
    assert classify([_in_the_second_call(report)], 1).reason == reason


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


# The line by which a verdict reports an exception.

_CARRIED = """CheckpointException ranks:dict_keys([0, 1])
Traceback (most recent call last): (RANK 0)
  File "torch/distributed/checkpoint/default_planner.py", line 495, in create_default_local_load_plan
    raise RuntimeError(f"Missing key in checkpoint state_dict: {fqn}.")
RuntimeError: Missing key in checkpoint state_dict: model.norm.weight.
Traceback (most recent call last): (RANK 1)
"""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("", "E"),
        ("first\nsecond", "E: first"),
        ("Error(s) in loading:\n\tMissing key(s)\n\tmore", "E: Error(s) in loading: Missing key(s)"),
        (_CARRIED, "E: RuntimeError: Missing key in checkpoint state_dict: model.norm.weight."),
        (_CARRIED.splitlines()[0] + "\n" + _CARRIED.splitlines()[1], "E: CheckpointException ranks:dict_keys([0, 1])"),
    ],
)
def test_the_line_says_what_went_wrong_and_no_heading(message: str, expected: str) -> None:
    assert Failure(type="E", message=message, traceback="", time=0.0).summary == expected
