"""A module whose import tells a test that a worker is starting, and then never ends."""

from __future__ import annotations

import os
import signal

from faults.processes import healthy

if os.environ.get("RANK") == "0":
    with open(os.environ["FSDP_DOCTOR_TEST_FIFO"], "w") as fifo:
        fifo.write("importing")
while os.environ.get("RANK") is not None:
    signal.pause()

__all__ = ["healthy"]
