"""Renders a report as a heat map in SVG.

Rows are methods, columns are strategies, scenarios and offloads, and each verdict has a colour.
"""

from __future__ import annotations

import itertools
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

_CELL, _STEP, _GROUP_GAP, _STRATEGY_GAP, _MARGIN = 12, 13, 3, 20, 16
_FONT, _CHARACTER, _TITLE_CHARACTER = 11, 6.4, 9  # pixels; no character of the fonts below is wider
_LONGEST_TITLE = 160
# The names of columns are rotated by 60 degrees. These are a name's height and width per pixel of its length.
_RISE, _RUN = 0.87, 0.5

# The colours on a light and on a dark background, and a letter for people who cannot tell the colours apart.
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
    """The results of one direction, for all strategies of a framework or of torch, side by side.

    columns: the words of each scenario.
    """

    direction: str
    methods: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    cells: dict[tuple[str, tuple[str, ...]], CaseResult]

    @property
    def shared(self) -> list[str]:
        """The words after the offload that all columns share; the columns' names do not repeat them."""
        return [word for word in self.columns[0][2:] if all(word in words[2:] for words in self.columns)]

    @property
    def title(self) -> str:
        return ", ".join([self.direction, *self.shared])

    @property
    def names(self) -> list[str]:
        """The names of the columns, without the word ``unstaged`` and without the words that all columns share."""
        return [
            " ".join([words[1], *(word for word in words[2:] if word not in ("unstaged", *self.shared))])
            for words in self.columns
        ]

    @property
    def places(self) -> list[int]:
        """The horizontal offset of each column. A gap separates two strategies, and two scenarios."""
        places, start = [0], 0
        for before, words in itertools.pairwise(self.columns):
            place = places[-1] + _STEP
            if before[0] != words[0]:
                start = place = max(place, start + len(before[0]) * _TITLE_CHARACTER) + _STRATEGY_GAP
            elif before[2:] != words[2:]:
                place += _GROUP_GAP
            places.append(place)
        return places

    @property
    def height(self) -> int:
        return self.head + len(self.methods) * _STEP

    @property
    def head(self) -> int:
        """The height of the block's title and of its columns' names."""
        return 32 + round(max(map(len, self.names)) * _CHARACTER * _RISE)

    @property
    def width(self) -> int:
        """The width of the cells, including the part of the last columns' names that extends beyond them."""
        names = zip(self.places, self.names, strict=True)
        return max(place + _STEP + round(len(name) * _CHARACTER * _RUN) for place, name in names)


def render_heat_map(report: Report) -> str:
    """Renders all results of a report on one page, which is as high and wide as needed."""
    blocks = _make_blocks(report)
    kinds = Counter(result.verdict.kind for result in report.results)
    labels = [len(name) * _CHARACTER for block in blocks for name in block.methods]
    titles = [len(block.title) * _TITLE_CHARACTER for block in blocks]
    left = _MARGIN + round(max((*labels, *titles), default=0)) + 8
    legend = [(f"{count} {kind}", kind) for kind in MEANING if (count := kinds[kind])]
    width = max(
        _MARGIN * 2 + sum(len(text) * 7 + 32 for text, _ in legend), *(left + block.width for block in blocks), 480
    )
    parts = list(_draw_head(report, legend))
    top = 78
    for block in blocks:
        parts += _draw_block(block, left, top)
        top += block.height + 18
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
    blocks: dict[tuple[str, str], dict[tuple[str, tuple[str, ...]], CaseResult]] = {}
    for result in report.results:
        case = result.case
        direction = "extraction" if find_direction(case) == "out" else "loading"
        framework = read_leading_words(case)[0].rpartition(":")[0]
        cells = blocks.setdefault((framework, direction), {})
        cells[result.method, tuple(case.scenario.id.split("/"))] = result
    arranged = []
    for (_, direction), cells in blocks.items():
        # Columns are sorted so that the offloads of one scenario are adjacent.
        columns = list(dict.fromkeys(words for _, words in cells))
        scenarios = list(dict.fromkeys((words[0], words[2:]) for words in columns))
        offloads = sort_by_table((words[1] for words in columns), tuple(AXIS["offload"].values))
        strategies = list(dict.fromkeys(words[0] for words in columns))
        columns.sort(
            key=lambda words: (
                strategies.index(words[0]),
                scenarios.index((words[0], words[2:])),
                offloads.index(words[1]),
            )
        )
        methods = sort_by_table((method for method, _ in cells), METHOD_NAMES)
        arranged.append(_Block(direction=direction, methods=methods, columns=tuple(columns), cells=cells))
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
    yield f'<text x="{_MARGIN}" y="{top + 12}" class="title">{_escape(block.title)}</text>'
    first = top + block.head
    for number, method in enumerate(block.methods):
        yield f'<text x="{left - 8}" y="{first + number * _STEP + 10}" class="row">{_escape(method)}</text>'
    drawn: set[str] = set()
    for words, name, place in zip(block.columns, block.names, block.places, strict=True):
        x = left + place
        if words[0] not in drawn:
            drawn.add(words[0])
            yield f'<text x="{x}" y="{top + 12}" class="title">{_escape(words[0])}</text>'
        yield f'<text transform="translate({x + 9} {first - 5}) rotate(-60)">{_escape(name)}</text>'
        for row, method in enumerate(block.methods):
            if (result := block.cells.get((method, words))) is not None:
                yield _draw_cell(x, first + row * _STEP, result.verdict.kind, f"{result.id}: {result.verdict.reason}")


def _draw_cell(x: int, y: int, kind: VerdictKind, title: str = "") -> str:
    """Draws a cell.

    title: the text that is shown while the mouse is over the cell.
    """
    title = textwrap.shorten(title.rstrip(": "), _LONGEST_TITLE, placeholder=" ...")
    said = f"<title>{_escape(title)}</title>" if title and kind not in NOT_RUN else ""
    letter = _COLOURS[kind][2]
    text = f'<text x="{x + _CELL / 2:g}" y="{y + 9}" class="letter">{letter}</text>' if letter else ""
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
