"""Ledgers by job, as tables and pictures show them: of each stage that of the rank that comes highest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_doctor.ledgers.stage_ledger import CLASSES, MemoryClass, StageLedger

_UNITS = (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30))


@dataclass(frozen=True)
class JobLedgers:
    """The stages of one job in their order, each once for each path that it is a stage of."""

    job: str
    stages: tuple[StageLedger, ...]

    @property
    def highest(self) -> int:
        """Bytes of the highest bar: of the device at a peak, or of the host."""
        return max((max(_peak(ledger), _host(ledger)) for ledger in self.stages), default=0)

    @property
    def capacity(self) -> int | None:
        """Of a device; None where nobody says it, or so much that it is no limit."""
        said = [ledger.device.capacity for ledger in self.stages if ledger.device and ledger.device.capacity]
        return min(said) if said and min(said) < 4 * self.highest else None

    @property
    def classes(self) -> tuple[MemoryClass, ...]:
        """Those that hold anything anywhere."""
        bytes_of = [held for ledger in self.stages for held in _held(ledger)]
        return tuple(name for name in CLASSES if any(held.get(name) for held in bytes_of))


def by_job(ledgers: Iterable[StageLedger]) -> list[JobLedgers]:
    jobs: dict[str, dict[tuple[str, str], StageLedger]] = {}
    for ledger in ledgers:
        stages = jobs.setdefault(ledger.job, {})
        known = stages.get((ledger.stage, ledger.path))
        if known is None or _peak(ledger) > _peak(known):
            stages[ledger.stage, ledger.path] = ledger
    return [JobLedgers(job, tuple(stages.values())) for job, stages in jobs.items()]


def unit_for(nbytes: int) -> tuple[str, int]:
    """The unit in which so many bytes have two to five digits."""
    return next(((name, size) for name, size in _UNITS if nbytes < 10240 * size), _UNITS[-1])


def _peak(ledger: StageLedger) -> int:
    return ledger.device.peak if ledger.device is not None else 0


def _host(ledger: StageLedger) -> int:
    return ledger.host.pinned_reserved + ledger.host.pageable


def _held(ledger: StageLedger) -> list[dict[MemoryClass, int]]:
    device = [ledger.device.held, ledger.device.at_peak] if ledger.device is not None else []
    return [*device, ledger.host.held]
