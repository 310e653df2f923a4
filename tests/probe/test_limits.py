"""Tests how long a stage may last, and how long the other ranks have once one is in trouble."""

from __future__ import annotations

import pytest

from fsdp_doctor.probe import deadlines
from fsdp_doctor.probe.deadlines import Deadline, Deadlines, Limits


def stopped_after(monkeypatch: pytest.MonkeyPatch, grace: float | None, idle: bool) -> float:
    """Seconds from the trouble to the order, where the others have done nothing since, or work."""
    times = iter(tenths := [number / 10 for number in range(600)])
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: next(times))
    looking = deadlines.Watch(Deadlines(Limits(grace=grace)), grace, [None])
    return next(now for now in tenths if looking.look([None], lambda: True, lambda: 60.0 if idle else 0.0) is not None)


@pytest.mark.parametrize(
    ("grace", "idle", "seconds"),
    [(None, True, 1.0), (None, False, 5.0), (8.0, True, 8.0), (1.0, False, 1.0)],
)
def test_the_grace_is_5_seconds_1_if_idle_or_the_given_time(
    monkeypatch: pytest.MonkeyPatch, grace: float | None, idle: bool, seconds: float
) -> None:
    assert seconds < stopped_after(monkeypatch, grace, idle) < seconds + 0.5


@pytest.mark.parametrize(("longest", "idle"), [(0.0, 5.0), (0.5, 5.0), (2.0, 8.0), (5.0, 20.0), (60.0, 30.0)])
def test_the_deadline_follows_the_slowest_that_was_seen(longest: float, idle: float) -> None:
    deadlines = Deadlines(Limits())
    for seconds in (longest, longest / 2):
        deadlines.note_progress(seconds)
    assert deadlines.choose("extract") == Deadline(idle=idle, busy=30.0)


def test_what_grows_with_the_model_has_the_time_of_a_start() -> None:
    deadlines = Deadlines(Limits(start=123.0))
    for stage in ("start", "build", "reference", "fingerprint", "verify"):
        assert deadlines.choose(stage) == Deadline(idle=None, busy=123.0)


def test_a_given_deadline_follows_nothing() -> None:
    deadlines = Deadlines(Limits(stage=12.0))
    deadlines.note_progress(100.0)
    assert deadlines.choose("next step") == Deadline(idle=None, busy=12.0)


def test_a_tests_timeout_holds_for_its_stage_and_grows_with_the_model() -> None:
    deadlines = Deadlines(Limits(), test_timeout=7.0)
    assert deadlines.choose("test").busy == deadlines.choose("build").busy == 7.0
    assert deadlines.choose("extract").busy == 30.0
