"""What every format takes from the report: distinct failures, figures, the summary."""

import dataclasses

import pytest
from support.reports import CASES, report, result

from fsdp_doctor.report.document import (
    result_of,
)
from fsdp_doctor.report.failure_groups import distinct_failures, numbers
from fsdp_doctor.report.layout import bytes_text, summary
from fsdp_doctor.verdict.classification import MEANING, Verdict
from fsdp_doctor.verdict.records import (
    Failure,
    RankReport,
    Record,
)


def test_failures_that_differ_only_in_ranks_and_devices_are_one_and_the_most_frequent_is_first():
    reasons = ["rank 0: other", "rank 0: on cuda:0", "ranks 1, 3: on cuda:1", "on cuda:7", "rank 2: OTHER"]
    results = [result(case, reason=reason) for case, reason in zip(CASES, reasons, strict=False)]
    results.append(result(CASES[10], "hang", "on cuda:0"))
    results.append(result(CASES[11], "ok", ""))
    failures = distinct_failures(report(*results))
    assert [(f.number, f.kind, f.reason, len(f.results)) for f in failures] == [
        (1, "crash", "rank 0: on cuda:0", 3),
        (2, "crash", "rank 0: other", 1),
        (3, "crash", "rank 2: OTHER", 1),
        (4, "hang", "on cuda:0", 1),
    ]
    assert [numbers(failures).get(one.id) for one in results] == [2, 1, 1, 1, 3, 4, None]


def test_a_failure_shows_the_traceback_of_a_rank_that_the_verdict_names():
    case = CASES[0]

    def rank(number):
        failure = Failure(type="E", message="m", traceback=f"of rank {number}", time=1.0)
        return RankReport(rank=number, record=Record(case_id=case.id, stage="extract", failure=failure))

    verdict = Verdict(kind="crash", reason="m", ranks=(2,))
    one = result_of(case, verdict, [rank(0), RankReport(rank=1), rank(2)], 1.0)
    assert distinct_failures(report(one))[0].traceback == "of rank 2"


def test_a_result_sums_up_the_slowest_and_the_largest_rank_and_keeps_reports_of_bad_cases_alone():
    ranks = [
        RankReport(rank=r, record=Record(case_id="x", stage="next step", seconds=s, peak_extra_bytes=p, done=True))
        for r, (s, p) in enumerate([(0.25, 7), (0.75, None), (None, 3)])
    ]
    for kind in MEANING:
        one = result_of(CASES[0], Verdict(kind=kind), [*ranks, RankReport(rank=3)], 2.0)
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
    assert expected in summary(dataclasses.replace(made, **fields))


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
    assert bytes_text(number) == text
