"""Ledgers as JSON."""

from __future__ import annotations

import json

import pytest

from fsdp_doctor.errors import UsageError
from fsdp_doctor.ledgers.ledger import (
    DeviceLedger,
    HostLedger,
    LedgerFile,
    StageLedger,
    ledgers_from_json,
    ledgers_to_json,
)

LEDGER = StageLedger(
    job="fsdp2/param/staged",
    stage="extracted",
    path="full_tensors",
    rank=1,
    host=HostLedger(held={"parameters": 512}, pinned=512, pinned_reserved=512, pageable=0),
    device=DeviceLedger(
        held={"buffers": 512},
        at_peak={"buffers": 512, "gathered outputs": 1024},
        allocated=512,
        peak=1536,
        reserved=2 << 20,
        peak_reserved=2 << 20,
        capacity=1 << 30,
    ),
)
FILE = LedgerFile(origin="measured", command="fsdp-doctor memory", device="2 x emulated", ledgers=(LEDGER,))


def test_a_file_of_ledgers_comes_back_as_it_was_written() -> None:
    assert ledgers_from_json(ledgers_to_json(FILE)) == FILE


def test_what_is_no_file_of_ledgers_is_refused_in_a_sentence() -> None:
    other = json.dumps(json.loads(ledgers_to_json(FILE)) | {"schema": "fsdp-doctor/report"})
    for text in ("", "[]", "{}", other, ledgers_to_json(FILE).replace('"rank"', '"rang"')):
        with pytest.raises(UsageError, match="no file of ledgers"):
            ledgers_from_json(text)
