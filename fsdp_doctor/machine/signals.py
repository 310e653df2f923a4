"""Handles the signals that end a run.

The user or the system sends such a signal, or the kernel when the parent process ends.
"""

from __future__ import annotations

import ctypes
import signal
from types import FrameType

from fsdp_doctor.errors import Interrupted

_PR_SET_PDEATHSIG = 1


class Interruption:
    """Converts SIGINT, SIGTERM and SIGHUP to an exception at the next safe point.

    received: the last signal; None before the first.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def check(self) -> None:
        """Raises Interrupted if a signal was received."""
        if self.received is not None:
            raise Interrupted(f"stopped by {signal.Signals(self.received).name}")


def die_with_parent(number: signal.Signals) -> None:
    """Makes the kernel send a signal to this process when its parent process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
