"""Renders an examination for a terminal: one row for each group of equal tensors, then the findings."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_doctor.examination.facts import Facts, NameFacts, TensorState
from fsdp_doctor.examination.findings import Finding
from fsdp_doctor.machine.terminal import measure_width
from fsdp_doctor.text import join_some
from fsdp_doctor.weights.fsdp.dtypes import name_dtype

_WIDTH = 120
_STYLE = {"bad": "bold red", "hazard": "yellow", "note": "dim"}
_COLUMNS = ("what", "count", "says", "lies on", "pinned", "dtype", "placements", "mesh", "even", "first")


def render_plain_text(facts: Facts, findings: tuple[Finding, ...]) -> str:
    """Renders a text as wide as the terminal, without blanks at the ends of lines."""
    width = measure_width(_WIDTH)
    console = Console(width=width, file=io.StringIO(), no_color=True, highlight=False, legacy_windows=False)
    console.print(render(facts, findings))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().split("\n"))


def render(facts: Facts, findings: tuple[Finding, ...]) -> RenderableType:
    return Group(*_render_head(facts), _render_table(facts), *_render_lines(findings))


def _render_head(facts: Facts) -> Iterator[Text]:
    for unit in facts.units:
        pinning = (", pinned" if unit.pins else ", not pinned") if unit.policy else ""
        offload = f"under CPU offload{pinning}" if unit.policy else "no offload policy"
        fresh = "" if unit.initialized else ", before the first forward"
        yield Text(f"{unit.strategy} on {unit.compute_device}, {offload}{fresh}")
    count = sum(len(row.holds) or 1 for row in facts.parameters if not row.tied_to)
    tied = sum(bool(row.tied_to) for row in facts.parameters)
    yield Text(f"{count} parameters{f' and {tied} tied names' if tied else ''}, {len(facts.buffers)} buffers")
    if text := _render_names(facts.names):
        yield Text(text)


def _render_names(names: NameFacts) -> str:
    if names.unknown:
        return ""
    if names.refused:
        return f"names on the Hub: {names.refused}"
    if not names.others:
        return "names: as on the Hub"
    name, of_hub = max(names.others.items(), key=lambda item: len(item[1]))
    count = f"{len(names.others)} of {names.model_names} tensors have other names on the Hub"
    return f"names: {count}; {name} is {join_some(of_hub, 1)} there"


def _render_table(facts: Facts) -> Table:
    lines: list[tuple[str, ...]] = []
    for state, rows in (*facts.by_state.items(), *facts.buffers_by_state.items()):
        cells: tuple[str, ...] = (
            "fsdp1 flat" if state.kind == "fsdp1" else state.kind,
            str(sum(not row.tied_to for row in rows)),
            str(state.wrapper_device),
            str(state.device),
            _choose_word(state.pinned),
            name_dtype(state.dtype),
            " ".join(map(str, state.placements)),
            _describe_mesh(state),
            _choose_word(state.even),
            rows[0].name,
        )
        lines.append(cells)
    for group in facts.optimizer:
        count, pinned = str(len(group.names)), _choose_word(group.pinned if group.device.type == "cpu" else None)
        cells = (f"state {group.entry}", count, "", str(group.device), pinned, "", "", "", "", group.names[0])
        lines.append(cells)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    filled = [at for at in range(len(_COLUMNS)) if any(cells[at] for cells in lines)]
    for at in filled:
        table.add_column(_COLUMNS[at], justify="right" if _COLUMNS[at] == "count" else "left", overflow="fold")
    for cells in lines:
        table.add_row(*(Text(cells[at]) for at in filled))
    return table


def _describe_mesh(state: TensorState) -> str:
    if state.mesh is None:
        return ""
    names = state.mesh.names or [""] * len(state.mesh.shape)
    return " x ".join(f"{name} {size}".strip() for name, size in zip(names, state.mesh.shape, strict=True))


def _choose_word(answer: bool | None) -> str:
    return {None: "", True: "yes", False: "no"}[answer]


def _render_lines(findings: tuple[Finding, ...]) -> Iterator[Text]:
    if not findings:
        yield Text("nothing found")
    for finding in findings:
        text = Text(f"{finding.severity}, {finding.kind}: ", style=_STYLE[finding.severity])
        text.append(finding.sentence, style="default")
        if finding.remedy:
            text.append(f" Remedy: {finding.remedy}", style="default")
        if finding.entry:
            text.append(f" [{finding.entry}]", style="dim")
        yield text
