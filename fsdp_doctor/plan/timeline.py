"""A device's memory while a stage is replayed: what is held by class, and the moment at which the most is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fsdp_doctor.ledgers.stage_ledger import Bytes, DeviceLedger, MemoryClass


class Timeline:
    """What one device holds, as a stage goes on; bytes, of each tensor in multiples of 512."""

    def __init__(self) -> None:
        self._held: dict[MemoryClass, int] = {}
        self._at_peak: Bytes = {}
        self._peak = 0

    def change(self, by: Bytes) -> None:
        """Several classes at one moment."""
        for what, nbytes in by.items():
            self._held[what] = self._held.get(what, 0) + nbytes
            assert self._held[what] >= 0, what
        now = sum(self._held.values())
        if now > self._peak:
            self._peak, self._at_peak = now, {name: size for name, size in self._held.items() if size}

    def take(self, what: MemoryClass, nbytes: int) -> None:
        self.change({what: nbytes})

    def give(self, what: MemoryClass, nbytes: int) -> None:
        self.change({what: -nbytes})

    def held(self, what: MemoryClass) -> int:
        return self._held.get(what, 0)

    @contextlib.contextmanager
    def taken(self, what: MemoryClass, nbytes: int) -> Iterator[None]:
        """For as long as the block lasts."""
        self.take(what, nbytes)
        yield
        self.give(what, nbytes)

    def end_stage(self, capacity: int | None = None) -> DeviceLedger:
        """What the stage came to; the next one begins with what is held now."""
        held = {name: size for name, size in self._held.items() if size}
        allocated = sum(held.values())
        ledger = DeviceLedger(
            held=held,
            at_peak=self._at_peak,
            allocated=allocated,
            peak=self._peak,
            reserved=allocated,
            peak_reserved=self._peak,
            capacity=capacity,
        )
        self._peak, self._at_peak = allocated, held
        return ledger
