"""Renders the report as GitHub Markdown that is short enough for an issue."""

from __future__ import annotations

import re

from fsdp_doctor.machine.environment import format_lines
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.methods import is_user_method
from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.failure_groups import FailureGroup, group_failures, number_failures
from fsdp_doctor.report.layout import Grid, find_fixes, make_grids, rerun_command, summarize
from fsdp_doctor.text import find_main_thread, format_bytes, format_count, format_seconds
from fsdp_doctor.verdict.classification import GOOD

# An issue on GitHub has at most 65,536 characters.
_LIMIT = 60_000
_TRACEBACK_LINES = 12
_STACK_LINES = 14
_SHOWN_CASES = 5
_REASON_CHARACTERS = 2_000


def render(report: Report) -> str:
    """Renders as much as fits into an issue on GitHub, and counts the parts that do not fit."""
    failures = group_failures(report)
    number_of = number_failures(failures)
    text = _Text(_LIMIT)
    text.add([f"## fsdp-doctor {report.version}", "", summarize(report), ""])
    text.add([line for note in report.notes for line in (f"> {note}", "")])
    environment = "\n".join(format_lines(report.environment))
    text.add([*_fence(report.command), "", *_render_details("Environment", environment)])
    text.add_all("tables", [[_render_grid(grid, number_of)] for grid in make_grids(report)], share=0.5)
    text.add_all("rows of the fix", [[_render_comparison(report)]], share=0.6)
    text.add_all(
        "distinct failures",
        [[_block(report, failure, details=True), _block(report, failure, details=False)] for failure in failures],
        share=1.0,
    )
    return text.value


class _Text:
    """A text that grows up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.value = ""

    def add(self, lines: list[str]) -> None:
        self.value += "\n".join(lines) + "\n" if lines else ""

    def add_all(self, what: str, parts: list[list[list[str]]], share: float) -> None:
        """Adds the first form of each part that keeps the text within ``share`` of the limit.

        Parts of which no form fits are counted in a line at the end.
        """
        left_out = 0
        for forms in parts:
            fitting = (
                form for form in forms if len(self.value) + sum(map(len, form)) + len(form) < self._limit * share
            )
            form = next(fitting, None)
            if form is None:
                left_out += 1
            else:
                self.add(form)
        if left_out:
            self.add(["", f"{left_out} more {what} are in the JSON report.", ""])


def _render_grid(grid: Grid, number_of: dict[str, int]) -> list[str]:
    if (uniform := grid.uniform) is not None:
        return [f"**{grid.title}**: {len(grid.cells)} cases {uniform.verdict.kind}: {uniform.verdict.reason}", ""]
    header = "| method | " + " | ".join(grid.offloads) + " |"
    rule = "|---" * (len(grid.offloads) + 1) + "|"
    rows = [
        f"| `{method}` | "
        + " | ".join(_render_cell(grid.cells.get((method, offload)), number_of) for offload in grid.offloads)
        + " |"
        for method in grid.methods
    ]
    return [f"**{grid.title}**", "", header, rule, *rows, ""]


def _render_cell(result: CaseResult | None, number_of: dict[str, int]) -> str:
    if result is None:
        return ""
    kind = result.verdict.kind
    return f"**{kind}** [{number_of[result.id]}]" if result.verdict.bad else kind


def _render_comparison(report: Report) -> list[str]:
    """Renders a table of the results of this library's own methods.

    A row has the verdict, the time and the memory, and how many of the other methods in the scenario were ok or rightly
    refused.
    """
    fix_of = find_fixes(report)
    if not fix_of:
        return []
    lines = [
        "**The fix in each scenario**",
        "",
        "| fix | verdict | time | peak extra | methods ok |",
        "|---|---|---|---|---|",
    ]
    for fix in {fix.id: fix for fix in fix_of.values()}.values():
        others = [result for result in report.results if fix_of.get(result.id) is fix and result is not fix]
        worked = sum(result.verdict.kind in GOOD for result in others)
        lines.append(
            f"| {fix.id} | {fix.verdict.kind} | {format_seconds(fix.seconds)} "
            f"| {format_bytes(fix.peak_extra_bytes)} | {worked} of {len(others)} |"
        )
    return [*lines, ""]


def _block(report: Report, failure: FailureGroup, *, details: bool) -> list[str]:
    count = len(failure.results)
    lines = ["", f"### [{failure.number}] {failure.kind}: {format_count(count, 'case')}", ""]
    lines += _fence("\n".join([failure.reason, *failure.also])[:_REASON_CHARACTERS])
    known = failure.known
    if known is not None:
        references = f" ({', '.join(known.references)})" if known.references else ""
        lines += ["", f"Known: {known.title}, [`{known.id}`]({known.page}){references}. {known.advice}"]
    shown = [result.id for result in failure.results[:_SHOWN_CASES]]
    confirmed = sum(result.confirmed is True for result in failure.results)
    ran_again = sum(result.confirmed is not None for result in failure.results)
    lines += ["", f"Run again in fresh workers: {confirmed} of {ran_again} gave the same verdict."] if ran_again else []
    lines += ["", *(f"`{case_id}`  " for case_id in shown)]
    lines += [f"and {count - len(shown)} more"] if count > len(shown) else []
    first = failure.results[0]
    lines += ["", f"Alone: `{rerun_command(report, first)}`", ""]
    if known is not None and not is_user_method(first.method):
        short = "; `--minimal` makes it short, where it can be" if isinstance(first.case, Case) else ""
        lines += [f"As a script: `fsdp-doctor repro '{first.id}'`{short}", ""]
    if details:
        traceback = failure.traceback.rstrip().splitlines()
        if len(traceback) > _TRACEBACK_LINES:
            traceback = ["...", *traceback[-_TRACEBACK_LINES:]]
        lines += _render_details("Traceback", "\n".join(traceback))
        for rank, stack in failure.stacks:
            lines += _render_details(f"Stack of rank {rank}", "\n".join(find_main_thread(stack)[:_STACK_LINES]))
    return lines


def _render_details(title: str, text: str) -> list[str]:
    if not text.strip():
        return []
    return [f"<details><summary>{title}</summary>", "", *_fence(text.rstrip()), "", "</details>", ""]


def _fence(text: str) -> list[str]:
    """Renders a code block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, text, fence]
