"""Renders the matrix for a terminal."""

from __future__ import annotations

import io
import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_doctor.machine.terminal import wrap, wrap_all
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.failure_groups import FailureGroup, group_failures, number_failures
from fsdp_doctor.report.layout import Grid, find_fixes, make_grids, rerun_command
from fsdp_doctor.text import find_main_thread, format_bytes, format_count, format_seconds, make_printable
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
_STACK_LINES = 7


def render(report: Report, width: int, color: bool, *, expected: Collection[str] = (), is_verbose: bool = False) -> str:
    """Renders the report as text, ``width`` columns wide. Nothing is cut, and the lines of commands are not broken.

    expected: the ids of bad cases that were expected. Unless is_verbose, the expected cases that the catalogue knows
        are summarized, in one line for each entry of the catalogue.
    """
    shown: list[FailureGroup] = []
    summed: dict[str, list[FailureGroup]] = {}
    for failure in group_failures(report):
        is_expected = failure.known is not None and all(result.id in expected for result in failure.results)
        if failure.known is not None and is_expected and not is_verbose:
            summed.setdefault(failure.known.id, []).append(failure)
        else:
            shown.append(replace(failure, number=len(shown) + 1))
    known = [
        [replace(failure, number=number) for failure in alike]
        for number, alike in enumerate(summed.values(), len(shown) + 1)
    ]
    parts = Group(
        _render_matrix(report, [*shown, *itertools.chain(*known)], width),
        *_render_beside_fix(report),
    )
    text = _render_text(parts, width, color)
    text += _render_text(_render_failures(report, shown, width), width, color, soft_wrap=True)
    return text + _render_text(_render_known(known, width), width, color, soft_wrap=True)


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
    """Renders one table, or several below each other if the terminal is too narrow for all offloads."""
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


def _render_beside_fix(report: Report) -> Iterator[Table]:
    """Renders a table for each scenario that lists its methods, followed by the fix."""
    fix_of = find_fixes(report)
    methods: dict[str, list[CaseResult]] = {}
    for result in report.results:
        fix = fix_of.get(result.id)
        if fix is not None and fix is not result and result.verdict.kind not in ("unsupported", "skipped"):
            methods.setdefault(fix.id, []).append(result)
    for results in methods.values():
        title = f"{results[0].case.scenario.id}, compared with the fix"
        table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False, box=box.SIMPLE_HEAD)
        for column in ("method", "verdict", "time", "peak extra"):
            table.add_column(column, no_wrap=True, justify="right" if column in ("time", "peak extra") else "left")
        for result in (*results, fix_of[results[0].id]):
            table.add_row(
                result.case.method,
                _render_verdict(result.verdict.kind),
                format_seconds(result.seconds),
                format_bytes(result.peak_extra_bytes),
            )
        yield table


def _render_failures(report: Report, failures: list[FailureGroup], width: int) -> RenderableType:
    text = Text()
    for failure in failures:
        text.append("\n").append(_render_failure(failure, width)).append("\n")
        for also in failure.also:
            text.append(wrap_all([f"   also: {make_printable(also)}"], width), style="dim")
        if failure.known is not None:
            name = f"{failure.known.short_code}, {failure.known.id}"
            lines = (f"   known: {failure.known.title} ({name})", f"   remedy: {failure.known.advice}")
            text.append(wrap_all(lines, width))
        for rank, stack in failure.stacks:
            shown = find_main_thread(stack)[1 : 1 + _STACK_LINES]
            text.append("\n".join([f"   stack of rank {rank}:", *(f"   {line}" for line in shown)]) + "\n", style="dim")
        for result in failure.results[:_SHOWN_CASES]:
            confirmed = {None: "", True: "  (confirmed)", False: "  (not confirmed)"}[result.confirmed]
            text.append(f"   {rerun_command(report, result)}{confirmed}\n", style="dim")
        if len(failure.results) > _SHOWN_CASES:
            text.append(f"   and {len(failure.results) - _SHOWN_CASES} more\n", style="dim")
    return text


def _render_known(known: list[list[FailureGroup]], width: int) -> RenderableType:
    """Renders a line for each entry of the catalogue.

    known: lists of failures with the same entry, which share one number.
    """
    if not known:
        return Text()
    heading = "Known failures, as expected (fsdp-doctor explain FDNNN has cause and remedy; --verbose the cases here):"
    lines = ["", heading]
    for alike in known:
        kinds = ", ".join(dict.fromkeys(failure.kind for failure in alike))
        count = format_count(sum(len(failure.results) for failure in alike), "case")
        if (entry := alike[0].known) is not None:
            lines.append(f"{alike[0].number:>3}  {entry.short_code} {kinds}, {count}: {entry.title}")
    return Text(wrap_all(lines, width))


def _render_failure(failure: FailureGroup, width: int) -> Text:
    head = f"{failure.number}  {failure.kind}, {format_count(len(failure.results), 'case')}: "
    text = Text("\n".join(wrap(f"{head}{make_printable(failure.reason)}", width)))
    text.stylize(_STYLE.get(failure.kind, _BAD_STYLE), 0, len(head))
    return text
