"""A test that goes on until somebody ends the run; it tells a pipe when it has begun."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import pytest


@pytest.mark.ranks(2, device="cpu")
def test_goes_on(this_rank: Any) -> None:
    this_rank.barrier()
    if this_rank.rank == 0:
        pathlib.Path(os.environ["FSDP_DOCTOR_TEST_FIFO"]).write_text("begun")
    signal.pause()
