"""Ledgers as JSON."""

from __future__ import annotations

import json

import pytest

from fsdp_doctor.errors import UsageError
from fsdp_doctor.examination.memory_records import (
    DeviceMemory,
    HostMemory,
    MemoryFile,
    StageMemory,
    format_memory_file,
    read_memory_file,
)

LEDGER = StageMemory(
    job="fsdp2/param/staged",
    stage="extracted",
    method="full_tensors",
    rank=1,
    host=HostMemory(held={"parameters": 512}, pinned=512, pinned_reserved=512, pageable=0),
    device=DeviceMemory(
        held={"buffers": 512},
        at_peak={"buffers": 512, "gathered outputs": 1024},
        allocated=512,
        peak=1536,
        reserved=2 << 20,
        peak_reserved=2 << 20,
        capacity=1 << 30,
    ),
)
FILE = MemoryFile(origin="measured", command="fsdp-doctor memory", device="2 x emulated", ledgers=(LEDGER,))


def test_a_file_of_ledgers_comes_back_as_it_was_written() -> None:
    assert read_memory_file(format_memory_file(FILE)) == FILE


def test_what_is_no_file_of_ledgers_is_refused_in_a_sentence() -> None:
    other = json.dumps(json.loads(format_memory_file(FILE)) | {"schema": "fsdp-doctor/report"})
    for text in ("", "[]", "{}", other, format_memory_file(FILE).replace('"rank"', '"rang"')):
        with pytest.raises(UsageError, match="not a file that `fsdp-doctor memory measure --json`"):
            read_memory_file(text)
