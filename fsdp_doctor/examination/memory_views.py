"""Renders memory ledgers as a table for a terminal, and as a picture."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_doctor.examination.memory_records import CLASSES, Bytes, MemoryClass, StageMemory

_BETWEEN_COLUMNS = 3
_LONG_NAME = 12
_UNITS = (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30))


@dataclass(frozen=True)
class JobMemory:
    """The stages of one job in order; a stage appears once for each extraction method."""

    job: str
    stages: tuple[StageMemory, ...]

    @property
    def highest(self) -> int:
        """Bytes of the highest bar: the largest peak of a device or of the host."""
        return max((max(memory.peak, memory.host.taken) for memory in self.stages), default=0)

    @property
    def capacity(self) -> int | None:
        """Capacity of a device; None if it is unknown, or at least four times the highest bar."""
        capacities = [memory.device.capacity for memory in self.stages if memory.device and memory.device.capacity]
        return min(capacities, default=None) if capacities and min(capacities) < 4 * self.highest else None

    @property
    def classes(self) -> tuple[MemoryClass, ...]:
        """Memory classes that have any bytes in some stage."""
        counts = [memory.host.held for memory in self.stages]
        for device in filter(None, (memory.device for memory in self.stages)):
            counts += [device.held, device.at_peak]
        return tuple(name for name in CLASSES if any(nbytes.get(name) for nbytes in counts))


def group_by_job(memories: Iterable[StageMemory]) -> list[JobMemory]:
    jobs: dict[str, dict[tuple[str, str], StageMemory]] = {}
    for memory in memories:
        stages = jobs.setdefault(memory.job, {})
        known = stages.get((memory.stage, memory.method))
        if known is None or memory.peak > known.peak:
            stages[memory.stage, memory.method] = memory
    return [JobMemory(job, tuple(stages.values())) for job, stages in jobs.items()]


def choose_unit(nbytes: int) -> tuple[str, int]:
    """Returns a unit's name and its size in bytes: the smallest unit in which the number stays below 10240."""
    return next(((name, size) for name, size in _UNITS if nbytes < 10240 * size), _UNITS[-1])


_SHORT: dict[MemoryClass, str] = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer state": "optimizer",
    "unsharded parameters": "unsharded",
    "gathered outputs": "outputs",
    "communication buffers": "comm.",
}


def render_memory_table(memories: Iterable[StageMemory], width: int, color: bool = False) -> str:
    """Renders a table for each job; a table that is too wide is divided by columns into several."""
    console = Console(
        width=400,  # so that no cell is cut
        file=io.StringIO(),
        force_terminal=color,
        no_color=not color,
        highlight=False,
        legacy_windows=False,
    )
    for job in group_by_job(memories):
        unit, size = choose_unit(job.highest)
        limit = f", of {_format_number(job.capacity, size)} {unit} on the device" if job.capacity else ""
        title = f"{job.job}, in {unit}, for the rank with the highest peak{limit}"
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(*_render_job(job, size, width), sep="\n")
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def _render_job(job: JobMemory, size: int, width: int) -> list[Table]:
    header = ["stage", "", "all", *(_SHORT.get(name, name) for name in job.classes), "reserved", "elsewhere"]
    rows = [row for memory in job.stages for row in _format_rows(memory, job.classes, size)]
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) + _BETWEEN_COLUMNS for column in columns]
    tables: list[list[int]] = []
    for number in range(2, len(columns)):
        if not tables or sum(widths[at] for at in (0, 1, *tables[-1], number)) > width:
            tables.append([])
        tables[-1].append(number)
    return [_render_columns([columns[at] for at in (0, 1, *numbers)]) for numbers in tables]


def _render_columns(columns: Sequence[tuple[str, ...]]) -> Table:
    """Renders columns as a table; the first two columns name the rows, and each column begins with its header."""
    table = Table(pad_edge=False, box=box.SIMPLE_HEAD)
    for number, (name, *_) in enumerate(columns):
        table.add_column(name, no_wrap=True, justify="left" if number < 2 else "right")
    for row in zip(*(cells for _, *cells in columns), strict=True):
        table.add_row(*row)
    return table


def _format_rows(memory: StageMemory, classes: tuple[MemoryClass, ...], size: int) -> list[list[str]]:
    rows = []
    if (device := memory.device) is not None:
        kept = [_format_number(device.reserved, size), _format_number(device.elsewhere, size)]
        rows += [["held", _format_number(device.allocated, size), *_format_cells(device.held, classes, size), *kept]]
        rows += [["peak", _format_number(device.peak, size), *_format_cells(device.at_peak, classes, size)]]
        rows[-1] += [_format_number(device.peak_reserved, size), ""]
    host = memory.host
    if taken := host.taken:
        pinned = f"pinned {_format_number(host.pinned, size)}" if host.pinned else ""
        rows += [["host", _format_number(host.pinned + host.pageable, size), *_format_cells(host.held, classes, size)]]
        rows[-1] += [_format_number(taken, size), pinned]
    names, (stage, _, method) = [memory.name], memory.name.partition(" ")
    # A long name goes on in the second row: it would take the room of two classes.
    if len(method) >= _LONG_NAME and len(rows) > 1:
        names = [stage, method]
    return [[name, *row] for name, row in itertools.zip_longest(names, rows, fillvalue="") if row]


def _format_cells(by_class: Bytes, classes: tuple[MemoryClass, ...], size: int) -> list[str]:
    return [_format_number(by_class.get(name) or None, size) for name in classes]


def _format_number(nbytes: int | None, size: int) -> str:
    if nbytes is None:
        return ""
    value = nbytes / size
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


# The palette of Okabe and Ito, which can be distinguished without red and green; grey for what is unexplained.
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


def render_memory_svg(memories: Iterable[StageMemory]) -> str:
    """Draws an SVG with a panel for each job; it contains no scripts and no external resources."""
    jobs = group_by_job(memories)
    width = _LEFT + _STEP * max((len(job.stages) for job in jobs), default=1) + _LEGEND
    panel = _TOP + _HEIGHT + _BELOW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{panel * max(1, len(jobs))}" {_FONT}>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for number, job in enumerate(jobs):
        parts += [f'<g transform="translate(0 {panel * number})">', *_draw_job(job, width), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_job(job: JobMemory, width: int) -> list[str]:
    top = max(job.highest, job.capacity or 0, 1) * 1.05
    unit, size = choose_unit(int(top))
    parts = [_draw_text(_LEFT, 24, f"{job.job}: the peak of each stage, and next to it the host, in {unit}", bold=True)]
    for tick in range(5):
        y = _compute_y(top * tick / 4, top)
        parts.append(f'<line x1="{_LEFT}" x2="{width - _LEGEND}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        parts.append(_draw_text(_LEFT - 6, y + 4, f"{top * tick / 4 / size:,.1f}", anchor="end"))
    for number, memory in enumerate(job.stages):
        parts += _draw_stage(memory, _LEFT + 10 + _STEP * number, top)
    if job.capacity:
        y = _compute_y(job.capacity, top)
        line = f'x1="{_LEFT}" x2="{width - _LEGEND}" y1="{y}" y2="{y}"'
        parts.append(f'<line {line} stroke="#cc0000" stroke-width="2" stroke-dasharray="6 4"/>')
        parts.append(_draw_text(_LEFT + 4, y - 4, f"limit {job.capacity / size:,.1f} {unit}"))
    return parts + _draw_legend(job, width - _LEGEND + 16)


def _draw_stage(memory: StageMemory, x: int, top: float) -> list[str]:
    parts = []
    if (device := memory.device) is not None:
        parts += _draw_stack(device.at_peak, x, _DEVICE_BAR, top)
        y = _compute_y(device.allocated, top)
        parts.append(f'<line x1="{x - 3}" x2="{x + _DEVICE_BAR + 3}" y1="{y}" y2="{y}" stroke="#000000"/>')
    parts += _draw_stack(memory.host.held, x + _DEVICE_BAR + 4, _HOST_BAR, top)
    place = f'transform="rotate(30 {x} {_TOP + _HEIGHT + 16})"'
    return [*parts, _draw_text(x, _TOP + _HEIGHT + 16, memory.name, more=place)]


def _draw_stack(by_class: Bytes, x: int, width: int, top: float) -> list[str]:
    parts, below = [], 0
    for name, colour in _COLOUR.items():
        nbytes = max(0, by_class.get(name, 0))
        if nbytes:
            y, height = _compute_y(below + nbytes, top), round(_HEIGHT * nbytes / top, 2)
            what = f"<title>{name}: {nbytes:,} bytes</title>"
            box = f'x="{x}" y="{y}" width="{width}" height="{height}"'
            parts.append(f'<rect {box} fill="{colour}">{what}</rect>')
            below += nbytes
    return parts


def _draw_legend(job: JobMemory, x: int) -> list[str]:
    parts = []
    for number, name in enumerate(reversed(job.classes)):
        y = _TOP + 18 * number
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLOUR[name]}"/>')
        parts.append(_draw_text(x + 18, y + 11, name))
    y = _TOP + 18 * len(job.classes) + 6
    parts.append(f'<line x1="{x}" x2="{x + 12}" y1="{y}" y2="{y}" stroke="#000000"/>')
    return [*parts, _draw_text(x + 18, y + 4, "held at the stage's end")]


def _compute_y(nbytes: float, top: float) -> float:
    return round(_TOP + _HEIGHT * (1 - nbytes / top), 2)


def _draw_text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False, more: str = "") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{weight} {more}>{escape(text)}</text>'
