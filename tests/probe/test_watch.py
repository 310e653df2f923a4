"""How long the other ranks have once one is in trouble."""

from __future__ import annotations

import pytest

from fsdp_doctor.probe import deadlines
from fsdp_doctor.probe.deadlines import Deadlines, Limits


def stopped_after(monkeypatch: pytest.MonkeyPatch, grace: float | None, idle: bool) -> float:
    """Seconds from the trouble to the order, where the others have done nothing since, or work."""
    times = iter(tenths := [number / 10 for number in range(600)])
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: next(times))
    looking = deadlines.Watch(Deadlines(Limits(grace=grace)), grace, [None])
    return next(now for now in tenths if looking.look([None], lambda: True, lambda: 60.0 if idle else 0.0) is not None)


@pytest.mark.parametrize(
    ("grace", "idle", "seconds"),
    [(None, True, 2.0), (None, False, 5.0), (8.0, True, 8.0), (1.0, False, 1.0)],
)
def test_the_others_have_5_seconds_2_where_they_do_nothing_or_what_was_given(
    monkeypatch: pytest.MonkeyPatch, grace: float | None, idle: bool, seconds: float
) -> None:
    assert seconds < stopped_after(monkeypatch, grace, idle) < seconds + 0.5
