"""Ledgers as a picture: stages along x, the classes of each peak stacked, the device's limit as a line."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from fsdp_doctor.ledgers.jobs import JobLedgers, by_job, unit_for
from fsdp_doctor.ledgers.stage_ledger import Bytes, MemoryClass, StageLedger

# Colours that are told apart without red and green, after Okabe and Ito; grey is nobody's.
_COLOUR: dict[MemoryClass, str] = {
    "parameters": "#0072b2",
    "gradients": "#d55e00",
    "optimizer state": "#e69f00",
    "unsharded parameters": "#56b4e9",
    "buffers": "#000000",
    "gathered outputs": "#cc79a7",
    "activations": "#009e73",
    "communication buffers": "#f0e442",
    "unexplained": "#999999",
}
_HEIGHT, _TOP, _LEFT, _BELOW = 260, 60, 70, 110
_STEP, _DEVICE_BAR, _HOST_BAR = 92, 40, 18
_LEGEND = 190
_FONT = 'font-family="sans-serif" font-size="12"'


def ledgers_svg(ledgers: Iterable[StageLedger]) -> str:
    """A panel for each job, beneath each other. Fetches nothing, and runs nothing."""
    jobs = by_job(ledgers)
    width = _LEFT + _STEP * max((len(job.stages) for job in jobs), default=1) + _LEGEND
    panel = _TOP + _HEIGHT + _BELOW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{panel * max(1, len(jobs))}" {_FONT}>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for number, job in enumerate(jobs):
        parts += [f'<g transform="translate(0 {panel * number})">', *_panel(job, width), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(job: JobLedgers, width: int) -> list[str]:
    top = max(job.highest, job.capacity or 0, 1) * 1.05
    unit, size = unit_for(int(top))
    parts = [_text(_LEFT, 24, f"{job.job}: the peak of each stage, and beside it the host, in {unit}", bold=True)]
    for tick in range(5):
        y = _y(top * tick / 4, top)
        parts.append(f'<line x1="{_LEFT}" x2="{width - _LEGEND}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{top * tick / 4 / size:,.1f}", anchor="end"))
    for number, ledger in enumerate(job.stages):
        parts += _stage(ledger, _LEFT + 10 + _STEP * number, top)
    if job.capacity:
        y = _y(job.capacity, top)
        line = f'x1="{_LEFT}" x2="{width - _LEGEND}" y1="{y}" y2="{y}"'
        parts.append(f'<line {line} stroke="#cc0000" stroke-width="2" stroke-dasharray="6 4"/>')
        parts.append(_text(_LEFT + 4, y - 4, f"limit {job.capacity / size:,.1f} {unit}"))
    return parts + _legend(job, width - _LEGEND + 16)


def _stage(ledger: StageLedger, x: int, top: float) -> list[str]:
    parts = []
    if (device := ledger.device) is not None:
        parts += _stack(device.at_peak, x, _DEVICE_BAR, top)
        y = _y(device.allocated, top)
        parts.append(f'<line x1="{x - 3}" x2="{x + _DEVICE_BAR + 3}" y1="{y}" y2="{y}" stroke="#000000"/>')
    parts += _stack(ledger.host.held, x + _DEVICE_BAR + 4, _HOST_BAR, top)
    place = f'transform="rotate(30 {x} {_TOP + _HEIGHT + 16})"'
    return [*parts, _text(x, _TOP + _HEIGHT + 16, ledger.name, more=place)]


def _stack(held: Bytes, x: int, width: int, top: float) -> list[str]:
    parts, below = [], 0
    for name, colour in _COLOUR.items():
        nbytes = max(0, held.get(name, 0))
        if nbytes:
            y, height = _y(below + nbytes, top), round(_HEIGHT * nbytes / top, 2)
            what = f"<title>{name}: {nbytes:,} bytes</title>"
            box = f'x="{x}" y="{y}" width="{width}" height="{height}"'
            parts.append(f'<rect {box} fill="{colour}">{what}</rect>')
            below += nbytes
    return parts


def _legend(job: JobLedgers, x: int) -> list[str]:
    parts = []
    for number, name in enumerate(reversed(job.classes)):
        y = _TOP + 18 * number
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLOUR[name]}"/>')
        parts.append(_text(x + 18, y + 11, name))
    y = _TOP + 18 * len(job.classes) + 6
    parts.append(f'<line x1="{x}" x2="{x + 12}" y1="{y}" y2="{y}" stroke="#000000"/>')
    return [*parts, _text(x + 18, y + 4, "held at the stage's end")]


def _y(nbytes: float, top: float) -> float:
    return round(_TOP + _HEIGHT * (1 - nbytes / top), 2)


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False, more: str = "") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{weight} {more}>{escape(text)}</text>'
