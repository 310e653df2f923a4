"""The facts that every format takes from the report: distinct failures, figures, the summary."""

from __future__ import annotations

import dataclasses

import pytest
from support.reports import CASES, report, result

from fsdp_doctor.report.document import make_result
from fsdp_doctor.report.failure_groups import group_failures, number_failures
from fsdp_doctor.report.layout import summarize
from fsdp_doctor.text import format_bytes
from fsdp_doctor.verdict.classification import MEANING, Verdict, VerdictKind
from fsdp_doctor.verdict.records import Failure, RankReport, Record


def _groups(kind: VerdictKind, *reasons: str) -> list[int]:
    """The number of cases of each group."""
    results = [result(case, kind, reason) for case, reason in zip(CASES, reasons, strict=False)]
    return [len(failure.results) for failure in group_failures(report(*results))]


_DIFFER = "8192 of 16448 elements differ, the first at 8256: nan, not 0.0118: model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("wrong", _DIFFER, "3 of 7 elements differ, the first at 0: -1.5e-07, not inf: model.norm.weight"),
        (
            "wrong",
            _DIFFER,
            f"rank 1: {_DIFFER}; 1 of 2 elements differ, the first at 0: True, not False: model.mask.on",
        ),
        ("wrong", "shape (64,), not (32, 64): a.b", "shape (128, 64), not (64, 64): c.d, e.f and 3 more"),
        ("leak", "428544 bytes of device memory not given back", "427520 bytes of device memory not given back"),
        ("incomplete", "missing of 27 names: a.b", "missing of 3 names: c.d, e.f"),
        ("oom", "OutOfMemoryError: Tried to allocate 2.00 GiB", "OutOfMemoryError: Tried to allocate 20.00 GiB"),
        ("crash", "ValueError: of <Group object at 0x7fb7d684c7f0>", "ValueError: of <Group object at 0x7fb7b82ef0b0>"),
        ("hang", "no progress in stage extract for 30 s: x", "no progress in stage extract for 7.5 s: x"),
    ],
)
def test_failures_that_differ_in_values_alone_are_one(kind: VerdictKind, one: str, other: str) -> None:
    assert _groups(kind, one, other) == [2]


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("wrong", _DIFFER, "shape (64,), not (32, 64): model.embed_tokens.weight"),
        ("wrong", _DIFFER, f"{_DIFFER}; came twice: model.embed_tokens.weight"),
        ("misplaced", "on cpu where cuda was promised: a.b", "on cuda where cpu was promised: a.b"),
        (
            "misplaced",
            "dtype float32 where bfloat16 was promised: a.b",
            "dtype bfloat16 where float32 was promised: a.b",
        ),
        ("leak", "5 bytes of device memory not given back", "5 of 5 bytes of shards stay on the device"),
        ("crash", "RuntimeError: CUDA error 700", "RuntimeError: CUDA error 719"),
        ("poisoned", "RuntimeError: CUDA error 700", "RuntimeError: CUDA error 719"),
        ("died", "ended with exit code 3", "ended with exit code 4"),
        ("hang", "no progress in stage extract for 30 s: x", "no progress in stage offload for 30 s: x"),
    ],
)
def test_failures_that_differ_in_more_are_two(kind: VerdictKind, one: str, other: str) -> None:
    assert _groups(kind, one, other) == [1, 1]


def test_known_failures_separate_equal_reasons_and_unknown_failures_come_first() -> None:
    results = [result(CASES[n], "wrong", _DIFFER, known=known) for n, known in enumerate(("a", "a", "b", "a", ""))]
    failures = group_failures(report(*results))
    assert [(failure.results[0].known, len(failure.results)) for failure in failures] == [("", 1), ("a", 3), ("b", 1)]


def test_a_kind_of_problem_is_told_once_with_a_count() -> None:
    others = "; ".join(
        f"{number} of 64 elements differ, the first at 0: 1.0, not 2.0: m.{number}" for number in range(9)
    )
    also = f"wrong: rank 1: {_DIFFER}; {others}"
    reason = f"rank 0: {_DIFFER}; shape (1,), not (2,): m.x; {others}"
    (failure,) = group_failures(report(result(kind="wrong", reason=reason, also=(also, "x; y; x"))))
    assert failure.reason == f"rank 0: {_DIFFER}, and 9 more like it; shape (1,), not (2,): m.x"
    assert failure.also == (f"wrong: rank 1: {_DIFFER}, and 9 more like it", "x; y; x")


def test_an_exceptions_message_is_told_as_it_is() -> None:
    message = "RuntimeError: 1 of 2; 1 of 2; 1 of 2"
    (failure,) = group_failures(report(result(reason=message)))
    assert failure.reason == message


def test_failures_that_differ_only_in_ranks_and_devices_are_one():
    reasons = ["rank 0: other", "rank 0: on cuda:0", "ranks 1, 3: on cuda:1", "on cuda:7", "rank 2: OTHER"]
    results = [result(case, reason=reason) for case, reason in zip(CASES, reasons, strict=False)]
    results.append(result(CASES[10], "hang", "on cuda:0"))
    results.append(result(CASES[11], "ok", ""))
    failures = group_failures(report(*results))
    assert [(f.number, f.kind, f.reason, len(f.results)) for f in failures] == [
        (1, "crash", "rank 0: on cuda:0", 3),
        (2, "crash", "rank 0: other", 1),
        (3, "crash", "rank 2: OTHER", 1),
        (4, "hang", "on cuda:0", 1),
    ]
    assert [number_failures(failures).get(one.id) for one in results] == [2, 1, 1, 1, 3, 4, None]


def test_a_failure_shows_the_traceback_of_a_rank_that_the_verdict_names():
    case = CASES[0]

    def rank(number):
        failure = Failure(type="E", message="m", traceback=f"of rank {number}", time=1.0)
        return RankReport(rank=number, record=Record(case_id=case.id, stage="extract", failure=failure))

    verdict = Verdict(kind="crash", reason="m", ranks=(2,))
    one = make_result(case, verdict, [rank(0), RankReport(rank=1), rank(2)], 1.0)
    assert group_failures(report(one))[0].traceback == "of rank 2"


def test_a_result_sums_up_the_slowest_and_the_largest_rank():
    ranks = [
        RankReport(rank=r, record=Record(case_id="x", stage="next step", seconds=s, peak_extra_bytes=p, done=True))
        for r, (s, p) in enumerate([(0.25, 7), (0.75, None), (None, 3)])
    ]
    for kind in MEANING:
        one = make_result(CASES[0], Verdict(kind=kind), [*ranks, RankReport(rank=3)], 2.0)
        assert (one.seconds, one.peak_extra_bytes, one.wall_seconds) == (0.75, 7, 2.0)
        assert bool(one.ranks) is one.verdict.bad


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "3 cases on 2 ranks of cuda: 2 ok, 1 crash"),
        (
            {"complete": False, "num_selected": 9},
            "3 cases of 9 selected (incomplete: still running) on 2 ranks of cuda",
        ),
        ({"complete": False, "num_selected": 9, "ended": "stopped by SIGINT"}, "(incomplete: stopped by SIGINT)"),
        ({"results": ()}, "0 cases on 2 ranks of cuda: no result"),
    ],
)
def test_the_summary_counts_verdicts_and_says_what_is_missing(fields, expected):
    made = report(result(CASES[0], "ok"), result(CASES[1]), result(CASES[2], "ok"))
    assert expected in summarize(dataclasses.replace(made, **fields))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_a_size_is_written_in_the_unit_that_keeps_it_readable(number, text):
    assert format_bytes(number) == text
