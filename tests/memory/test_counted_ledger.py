"""A device's ledger adds up to its counters, whatever is known of it."""

from __future__ import annotations

import pytest

from fsdp_doctor.ledgers.ledger import Bytes, total
from fsdp_doctor.memory.snapshot import Counters

_COUNTED = Counters(allocated=80, peak=100, reserved=120, peak_reserved=140, capacity=1000, elsewhere=7)


@pytest.mark.parametrize("held", [{}, {"parameters": 50}, {"parameters": 50, "gradients": 30}], ids=len)
def test_what_nobody_is_known_for_is_unexplained_now_and_at_the_peak(held: Bytes) -> None:
    ledger = _COUNTED.ledger(held, at_peak=held)
    assert (total(ledger.held), total(ledger.at_peak)) == (80, 100)
    assert ledger.held.get("unexplained", 0) == 80 - total(held)
    assert ledger.at_peak["unexplained"] == 100 - total(held)


def test_what_was_counted_is_in_it() -> None:
    ledger = _COUNTED.ledger({}, at_peak={})
    assert (ledger.allocated, ledger.peak, ledger.reserved) == (80, 100, 120)
    assert (ledger.peak_reserved, ledger.capacity, ledger.elsewhere) == (140, 1000, 7)
