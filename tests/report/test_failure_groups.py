"""What a report calls one failure, and the sentence that it tells of it."""

from __future__ import annotations

import pytest

from fsdp_doctor.matrix.selection import Selection, select
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.failure_groups import distinct_failures
from fsdp_doctor.verdict.classification import Verdict, VerdictKind

_CASES = select(Selection())


def _report(*verdicts: Verdict, known: tuple[str, ...] = ()) -> Report:
    results = tuple(
        CaseResult(case=case, verdict=verdict, known=known[number] if known else "")
        for number, (case, verdict) in enumerate(zip(_CASES, verdicts, strict=False))
    )
    return Report(
        version="0",
        created="",
        command="",
        device="cuda",
        world_size=2,
        num_selected=len(results),
        environment={},
        results=results,
    )


def _groups(kind: VerdictKind, *reasons: str) -> list[int]:
    """How many cases each group has."""
    failures = distinct_failures(_report(*(Verdict(kind=kind, reason=reason) for reason in reasons)))
    return [len(failure.results) for failure in failures]


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


def test_what_is_known_of_it_tells_equal_reasons_apart_and_the_unknown_comes_first() -> None:
    verdicts = [Verdict(kind="wrong", reason=_DIFFER)] * 5
    failures = distinct_failures(_report(*verdicts, known=("a", "a", "b", "a", "")))
    assert [(failure.results[0].known, len(failure.results)) for failure in failures] == [("", 1), ("a", 3), ("b", 1)]


def test_a_kind_of_problem_is_told_once_with_a_count() -> None:
    others = "; ".join(
        f"{number} of 64 elements differ, the first at 0: 1.0, not 2.0: m.{number}" for number in range(9)
    )
    also = f"wrong: rank 1: {_DIFFER}; {others}"
    verdict = Verdict(
        kind="wrong", reason=f"rank 0: {_DIFFER}; shape (1,), not (2,): m.x; {others}", also=(also, "x; y; x")
    )
    (failure,) = distinct_failures(_report(verdict))
    assert failure.reason == f"rank 0: {_DIFFER}, and 9 more like it; shape (1,), not (2,): m.x"
    assert failure.also == (f"wrong: rank 1: {_DIFFER}, and 9 more like it", "x; y; x")


def test_an_exceptions_message_is_told_as_it_is() -> None:
    message = "RuntimeError: 1 of 2; 1 of 2; 1 of 2"
    (failure,) = distinct_failures(_report(Verdict(kind="crash", reason=message)))
    assert failure.reason == message
