"""The starts of an engine as text: who holds what on the device, the refusal, and what would help."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fsdp_doctor.ledgers.jobs import unit_for
from fsdp_doctor.ledgers.ledger_file import LedgerFile, ledgers_to_json
from fsdp_doctor.ledgers.stage_ledger import CLASSES, DeviceLedger, MemoryClass
from fsdp_doctor.rollout.remedies import remedies
from fsdp_doctor.rollout.rollout_request import CUTS, Attempt, RolloutRequest

_OF_AN_ENGINE: dict[MemoryClass, str] = {"parameters": "weights", "buffers": "key-value cache"}
_OF_A_TRAINER: dict[MemoryClass, str] = {"parameters": "FSDP parameters"}


def rollout_as_text(request: RolloutRequest, attempts: Sequence[Attempt]) -> str:
    lines = [f"{request.model}: {CUTS[request.cut]}; {request.ranks} rank(s) of the trainer, {request.strategy}", ""]
    for attempt in attempts:
        lines += [*_of(attempt), ""]
    loaded = attempts[0]
    if loaded.start.refusal and (found := remedies(request, loaded)):
        unit, size = unit_for(loaded.start.total)
        lines.append("What would free how much on this device:")
        for remedy in found:
            suffices = "the engine starts" if remedy.suffices else "not enough"
            lines.append(f"  {remedy.frees / size:8.2f} {unit}  {suffices:17}  {remedy.setting}")
    return "\n".join(lines).rstrip() + "\n"


def rollout_as_json(request: RolloutRequest, attempts: Sequence[Attempt]) -> str:
    """As a file of ledgers, the trainer's and the engine's of each start."""
    notes = tuple(f"FSDP model {one.beside}: {one.start.refusal or 'the engine started'}" for one in attempts)
    file = LedgerFile(
        origin="measured",
        command="fsdp-doctor " + " ".join(sys.argv[1:]),
        device=f"{request.ranks} x {request.device}",
        ledgers=tuple(ledger for one in attempts for ledger in (one.trainer, one.engine)),
        notes=notes,
    )
    return ledgers_to_json(file)


def _of(attempt: Attempt) -> list[str]:
    start, trainer, engine = attempt.start, attempt.trainer.device, attempt.engine.device
    assert trainer is not None
    assert engine is not None
    unit, size = unit_for(start.total)
    # What would be shown as nothing is left out.
    least = size / 200
    left, right = _rows(trainer, _OF_A_TRAINER, least), _rows(engine, _OF_AN_ENGINE, least)
    title = f"FSDP model {attempt.beside}: {start.total / size:.2f} {unit}, of which {start.free / size:.2f} were free"
    lines = [f"{title} when the engine asked for {start.requested / size:.2f}", ""]
    lines.append(f"  {'trainer worker':34}engine")
    for row in range(max(len(left), len(right))):
        cells = [_cell(rows[row], size) if row < len(rows) else "" for rows in (left, right)]
        lines.append(f"  {cells[0]:34}{cells[1]}".rstrip())
    return [*lines, "", f"  {start.refusal or 'the engine started'}"]


def _rows(device: DeviceLedger, names: dict[MemoryClass, str], least: float) -> list[tuple[str, int]]:
    rows = [(names.get(name, name), device.held[name]) for name in CLASSES if device.held.get(name)]
    rows.append(("cached by the allocator", device.reserved - device.allocated))
    rows.append(("elsewhere on the device", device.elsewhere or 0))
    return [row for row in rows if row[1] >= least] + [("reserved in all", device.reserved)]


def _cell(row: tuple[str, int], size: int) -> str:
    return f"{row[0]:24}{row[1] / size:8.2f}"
