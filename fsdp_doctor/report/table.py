"""The matrix for a terminal."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.failure_groups import FailureGroup, group_failures, number_failures
from fsdp_doctor.report.layout import (
    Grid,
    find_fixes,
    find_main_thread,
    format_bytes,
    format_count,
    format_seconds,
    make_grids,
    make_printable,
    rerun_command,
)
from fsdp_doctor.verdict.classification import VerdictKind

_STYLE: dict[VerdictKind, str] = {
    "ok": "green",
    "refused": "cyan",
    "unsupported": "dim",
    "skipped": "dim",
    "lost": "bold yellow",
    "poisoned": "bold magenta",
    "leak": "magenta",
    "misplaced": "yellow",
}
_BAD_STYLE = "bold red"
_SHOWN_CASES = 3
_BETWEEN_COLUMNS = 3
_SIDE_BY_SIDE_WIDTH = 150
_STACK_LINES = 7


def render(report: Report, width: int, color: bool) -> str:
    """The whole report as text, ``width`` columns wide; the failures below the matrix are never cut or wrapped."""
    failures = group_failures(report)
    text = _render_text(_render_matrix(report, failures, width), width, color)
    if find_fixes(report):
        # A row is worth more whole than in view: a narrow terminal wraps it.
        text += _render_text(_render_side_by_side(report), max(width, _SIDE_BY_SIDE_WIDTH), color)
    return text + _render_text(_render_failures(report, failures), width, color, soft_wrap=True)


def _render_text(part: RenderableType, width: int, color: bool, soft_wrap: bool = False) -> str:
    console = Console(
        width=width,
        file=io.StringIO(),
        force_terminal=color,
        no_color=not color,
        highlight=False,
        legacy_windows=False,
    )
    console.print(part, soft_wrap=soft_wrap)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _render_matrix(report: Report, failures: list[FailureGroup], width: int) -> RenderableType:
    number_of = number_failures(failures)
    parts: list[RenderableType] = []
    for grid in make_grids(report):
        if (uniform := grid.uniform) is not None:
            text = f"{grid.title}: {len(grid.cells)} cases {uniform.verdict.kind}: {uniform.verdict.reason}\n"
            parts.append(Text(text, style="dim"))
        else:
            parts += _render_tables(grid, number_of, width)
    return Group(*parts)


def _render_tables(grid: Grid, number_of: dict[str, int], width: int) -> list[Table]:
    """One table, or several below each other if the terminal is too narrow for all offloads."""
    cells = [_render_cell(result, number_of).cell_len for result in grid.cells.values()]
    headers = [len(part) for offload in grid.offloads for part in _render_header(offload).split("\n")]
    room = width - max(len(method) for method in grid.methods) - 2
    across = max(1, room // (max(*cells, *headers) + _BETWEEN_COLUMNS))
    return [
        _render_table(grid, grid.offloads[first : first + across], number_of)
        for first in range(0, len(grid.offloads), across)
    ]


def _render_header(offload: str) -> str:
    return offload.replace("+", "\n+")


def _render_table(grid: Grid, offloads: tuple[str, ...], number_of: dict[str, int]) -> Table:
    table = Table(title=grid.title, title_justify="left", title_style="bold", pad_edge=False, box=box.SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    for offload in offloads:
        table.add_column(_render_header(offload), no_wrap=True)
    for method in grid.methods:
        table.add_row(method, *(_render_cell(grid.cells.get((method, offload)), number_of) for offload in offloads))
    return table


def _render_cell(result: CaseResult | None, number_of: dict[str, int]) -> Text:
    if result is None:
        return Text("")
    text = _render_verdict(result.verdict.kind)
    if result.id in number_of:
        text.append(f" {number_of[result.id]}", style="dim")
    return text


def _render_verdict(kind: VerdictKind) -> Text:
    return Text(kind, style=_STYLE.get(kind, _BAD_STYLE))


def _render_side_by_side(report: Report) -> Table:
    title = "each path, and the fix in the same scenario"
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False, box=box.SIMPLE_HEAD)
    for column in ("case", "verdict", "time", "peak extra", "fix", "time", "peak extra"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("time", "peak extra") else "left")
    fix_of = find_fixes(report)
    for result in report.results:
        fix = fix_of.get(result.id)
        if fix is None or fix is result or result.verdict.kind in ("unsupported", "skipped"):
            continue
        table.add_row(
            result.id,
            _render_verdict(result.verdict.kind),
            format_seconds(result.seconds),
            format_bytes(result.peak_extra_bytes),
            _render_verdict(fix.verdict.kind),
            format_seconds(fix.seconds),
            format_bytes(fix.peak_extra_bytes),
        )
    return table


def _render_failures(report: Report, failures: list[FailureGroup]) -> RenderableType:
    text = Text()
    for failure in failures:
        text.append("\n").append(_render_failure(failure)).append("\n")
        for also in failure.also:
            text.append(f"   also: {make_printable(also)}\n", style="dim")
        if failure.known is not None:
            text.append(f"   known: {failure.known.title} ({failure.known.id})\n")
            text.append(f"   remedy: {failure.known.remedy}\n")
        for rank, stack in failure.stacks:
            shown = find_main_thread(stack)[1 : 1 + _STACK_LINES]
            text.append("\n".join([f"   stack of rank {rank}:", *(f"   {line}" for line in shown)]) + "\n", style="dim")
        for result in failure.results[:_SHOWN_CASES]:
            confirmed = {None: "", True: "  (confirmed)", False: "  (not confirmed)"}[result.confirmed]
            text.append(f"   {rerun_command(report, result)}{confirmed}\n", style="dim")
        if len(failure.results) > _SHOWN_CASES:
            text.append(f"   and {len(failure.results) - _SHOWN_CASES} more\n", style="dim")
    return text


def _render_failure(failure: FailureGroup) -> Text:
    head = f"{failure.number}  {failure.kind}, {format_count(len(failure.results), 'case')}: "
    return Text(head, style=_STYLE.get(failure.kind, _BAD_STYLE)).append(
        make_printable(failure.reason), style="default"
    )
