"""A report as a heat map in SVG: methods down, offloads and scenarios across, a colour for each verdict."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from fsdp_doctor.matrix.axes import AXIS
from fsdp_doctor.matrix.cases import read_leading_words
from fsdp_doctor.matrix.methods import METHOD_NAMES, find_direction
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.layout import sort_by_table, summarize
from fsdp_doctor.text import make_printable
from fsdp_doctor.verdict.classification import MEANING, NOT_RUN, VerdictKind

_CELL, _STEP, _GROUP_GAP, _MARGIN = 13, 15, 6, 16
_FONT, _CHARACTER = 11, 6.4  # pixels; of the font below a character is at most so wide
_LONGEST_TITLE = 160
# Of a column's name, which is turned by 60 degrees: its height and its width for each pixel of its length.
_RISE, _RUN = 0.87, 0.5

# On light and on dark paper. A letter says the verdict to those who cannot tell the colours apart.
_COLOURS: dict[VerdictKind, tuple[str, str, str]] = {
    "ok": ("#8fd19e", "#2f7d46", ""),
    "refused": ("#9fd3d8", "#2b6f77", "r"),
    "wrong": ("#f4a72c", "#c47f12", "w"),
    "race": ("#ef9a76", "#b8592f", "s"),
    "incomplete": ("#f6c667", "#a87b1f", "i"),
    "misplaced": ("#fbe08d", "#8f7a2a", "m"),
    "poisoned": ("#e58fd0", "#a0448a", "p"),
    "leak": ("#b9a3e3", "#6b53a6", "l"),
    "order": ("#a9b7e8", "#4d61a8", "k"),
    "oom": ("#9a86d8", "#5b47a0", "o"),
    "crash": ("#e5534b", "#c93c37", "c"),
    "died": ("#b62324", "#96201f", "d"),
    "hang": ("#6e3fc4", "#8a63d2", "h"),
    "lost": ("#24292f", "#e6edf3", "?"),
    "unsupported": ("#e4e7eb", "#30363d", ""),
    "skipped": ("#e4e7eb", "#30363d", ""),
}
_STYLE = f"""
text {{ font: {_FONT}px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #24292f; }}
.title {{ font-size: 14px; font-weight: 600; }} .quiet {{ fill: #57606a; }}
.letter {{ font-size: 9px; text-anchor: middle; fill: #0008; }} .row {{ text-anchor: end; }}
"""


@dataclass(frozen=True)
class _Block:
    """The results of one strategy in one direction. columns: the words of a scenario without its strategy."""

    title: str
    methods: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    cells: dict[tuple[str, tuple[str, ...]], CaseResult]

    @property
    def names(self) -> list[str]:
        """The names of the columns, without the word for a scenario that is not staged."""
        return [" ".join(word for word in words if word != "unstaged") for words in self.columns]

    @property
    def height(self) -> int:
        return self.head + len(self.methods) * _STEP

    @property
    def head(self) -> int:
        """The height of its title and of its columns' names."""
        return 30 + round(max(map(len, self.names)) * _CHARACTER * _RISE)

    @property
    def width(self) -> int:
        """The width of the cells, and of the part of the last column's name that extends beyond them."""
        gaps = len({words[1:] for words in self.columns}) * _GROUP_GAP
        return len(self.columns) * _STEP + gaps + round(max(map(len, self.names)) * _CHARACTER * _RUN)


def render_heat_map(report: Report) -> str:
    """Renders all results that a report has; one page, as high and wide as it needs to be."""
    blocks = _make_blocks(report)
    kinds = Counter(result.verdict.kind for result in report.results)
    left = _MARGIN + round(max((len(name) for block in blocks for name in block.methods), default=0) * _CHARACTER) + 8
    legend = [(f"{count} {kind}", kind) for kind in MEANING if (count := kinds[kind])]
    width = max(
        _MARGIN * 2 + sum(len(text) * 7 + 32 for text, _ in legend), *(left + block.width for block in blocks), 480
    )
    parts = list(_draw_head(report, legend))
    top = 78
    for block in blocks:
        parts += _draw_block(block, left, top)
        top += block.height + 24
    for line in (summarize(report), *report.notes):
        parts.append(f'<text x="{_MARGIN}" y="{top}" class="quiet">{_escape(line)}</text>')
        top += 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + _MARGIN} {top}" '
        f'width="{width + _MARGIN}" height="{top}">\n<style>{_STYLE}{_make_colours()}</style>\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def _make_blocks(report: Report) -> list[_Block]:
    blocks: dict[str, dict[tuple[str, tuple[str, ...]], CaseResult]] = {}
    for result in report.results:
        case = result.case
        direction = "extraction" if find_direction(case) == "out" else "loading"
        words = case.scenario.id.split("/")[1:]
        cells = blocks.setdefault(f"{read_leading_words(case)[0]}, {direction}", {})
        cells[result.method, tuple(words)] = result
    arranged = []
    for title, cells in blocks.items():
        # The offloads of one scenario stand next to each other.
        columns = list(dict.fromkeys(words for _, words in cells))
        scenarios = list(dict.fromkeys(words[1:] for words in columns))
        offloads = sort_by_table((words[0] for words in columns), tuple(AXIS["offload"].values))
        columns.sort(key=lambda words: (scenarios.index(words[1:]), offloads.index(words[0])))
        methods = sort_by_table((method for method, _ in cells), METHOD_NAMES)
        arranged.append(_Block(title=title, methods=methods, columns=tuple(columns), cells=cells))
    return arranged


def _draw_head(report: Report, legend: Sequence[tuple[str, VerdictKind]]) -> Iterator[str]:
    accelerators = report.environment.get("accelerators") or [report.device]
    machine = f"{report.world_size} x {accelerators[0] if report.device != 'cpu' else 'cpu'}"
    torch = f", torch {report.packages['torch']}" if "torch" in report.packages else ""
    yield f'<text x="{_MARGIN}" y="24" class="title">{_escape(f"{machine}{torch}")}</text>'
    yield f'<text x="{_MARGIN}" y="42" class="quiet">{_escape(report.command)}</text>'
    x = _MARGIN
    for text, kind in legend:
        yield _draw_cell(x, 54, kind)
        yield f'<text x="{x + _CELL + 5}" y="64">{text}</text>'
        x += len(text) * 7 + 32


def _draw_block(block: _Block, left: int, top: int) -> Iterator[str]:
    yield f'<text x="{_MARGIN}" y="{top + 16}" class="title">{_escape(block.title)}</text>'
    first = top + block.head
    for number, method in enumerate(block.methods):
        yield f'<text x="{left - 8}" y="{first + number * _STEP + 10}" class="row">{_escape(method)}</text>'
    x = left
    for number, (words, name) in enumerate(zip(block.columns, block.names, strict=True)):
        if number and words[1:] != block.columns[number - 1][1:]:
            x += _GROUP_GAP
        yield f'<text transform="translate({x + 9} {first - 5}) rotate(-60)">{_escape(name)}</text>'
        for row, method in enumerate(block.methods):
            if (result := block.cells.get((method, words))) is not None:
                yield _draw_cell(x, first + row * _STEP, result.verdict.kind, f"{result.id}: {result.verdict.reason}")
        x += _STEP


def _draw_cell(x: int, y: int, kind: VerdictKind, title: str = "") -> str:
    """Draws a cell. title: shown while the mouse is over the cell."""
    title = textwrap.shorten(title.rstrip(": "), _LONGEST_TITLE, placeholder=" ...")
    said = f"<title>{_escape(title)}</title>" if title and kind not in NOT_RUN else ""
    letter = _COLOURS[kind][2]
    text = f'<text x="{x + _CELL / 2:g}" y="{y + 10}" class="letter">{letter}</text>' if letter else ""
    return f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" rx="2" class="{kind}">{said}</rect>{text}'


def _make_colours() -> str:
    light = " ".join(f".{kind} {{ fill: {colour}; }}" for kind, (colour, _, _) in _COLOURS.items())
    dark = " ".join(f".{kind} {{ fill: {colour}; }}" for kind, (_, colour, _) in _COLOURS.items())
    return (
        f"{light}\n@media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3; }} .quiet {{ fill: #9198a1; }} "
        f".letter {{ fill: #fffc; }} {dark} }}\n"
    )


def _escape(text: str) -> str:
    return escape(make_printable(text))
