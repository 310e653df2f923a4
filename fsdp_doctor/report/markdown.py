"""The report as GitHub Markdown, made to be attached to an issue: it fits the size of one."""

from __future__ import annotations

from fsdp_doctor.environment import lines_of
from fsdp_doctor.report.layout import (
    Failure,
    Grid,
    bytes_text,
    distinct_failures,
    fixes,
    grids,
    numbers,
    rerun_command,
    seconds_text,
    summary,
)
from fsdp_doctor.report.model import CaseResult, Report

# GitHub takes 65,536 characters in an issue.
_LIMIT = 60_000
_TRACEBACK_LINES = 12
_STACK_LINES = 14
_SHOWN_CASES = 5


def render(report: Report) -> str:
    failures = distinct_failures(report)
    number_of = numbers(failures)
    head = [f"## fsdp-doctor {report.version}", "", summary(report), "", "```", report.command, "```", ""]
    head += [*_environment(report), ""]
    matrix = [line for grid in grids(report) for line in _grid(grid, number_of)]
    comparison = _comparison(report)
    text = "\n".join([*head, *matrix, *comparison])
    for failure in failures:
        block = "\n".join(_block(report, failure, len(text) < _LIMIT // 2))
        if len(text) + len(block) > _LIMIT:
            left = len(failures) - failure.number + 1
            text += f"\n{left} more distinct failures are in the JSON report.\n"
            break
        text += block
    return text


def _environment(report: Report) -> list[str]:
    facts = lines_of(report.environment)
    return ["<details><summary>Environment</summary>", "", "```", *facts, "```", "", "</details>"]


def _grid(grid: Grid, number_of: dict[str, int]) -> list[str]:
    alike = grid.uniform
    if alike is not None:
        return [f"**{grid.title}**: {len(grid.cells)} cases {alike.verdict.kind}: {alike.verdict.reason}", ""]
    header = "| path | " + " | ".join(grid.offloads) + " |"
    rule = "|---" * (len(grid.offloads) + 1) + "|"
    rows = [
        f"| `{path}` | "
        + " | ".join(_cell(grid.cells.get((path, offload)), number_of) for offload in grid.offloads)
        + " |"
        for path in grid.paths
    ]
    return [f"**{grid.title}**", "", header, rule, *rows, ""]


def _cell(result: CaseResult | None, number_of: dict[str, int]) -> str:
    if result is None:
        return ""
    kind = result.verdict.kind
    return f"**{kind}** [{number_of[result.id]}]" if result.verdict.bad else kind


def _comparison(report: Report) -> list[str]:
    """The fix in each scenario against the slowest path that worked there."""
    fix_of = fixes(report)
    if not fix_of:
        return []
    lines = [
        "**full_tensors, the fix, in each scenario**",
        "",
        "| scenario | fix | time | peak extra | paths ok |",
        "|---|---|---|---|---|",
    ]
    for scenario, fix in fix_of.items():
        others = [r for r in report.results if r.case.scenario == scenario and r is not fix]
        worked = sum(r.verdict.kind == "ok" for r in others)
        lines.append(
            f"| {scenario.id} | {fix.verdict.kind} | {seconds_text(fix.seconds)} "
            f"| {bytes_text(fix.peak_extra_bytes)} | {worked} of {len(others)} |"
        )
    return [*lines, ""]


def _block(report: Report, failure: Failure, roomy: bool) -> list[str]:
    cases = "case" if len(failure.results) == 1 else "cases"
    lines = ["", f"### [{failure.number}] {failure.kind}: {len(failure.results)} {cases}", "", "```"]
    lines += [failure.reason, *failure.results[0].verdict.also]
    lines += ["```", ""]
    shown = [result.id for result in failure.results[:_SHOWN_CASES]]
    more = len(failure.results) - len(shown)
    lines += [f"`{case_id}`  " for case_id in shown] + ([f"and {more} more"] if more else [])
    lines += ["", f"Alone: `{rerun_command(report, failure.results[0])}`", ""]
    if roomy:
        lines += _details("Traceback", _last(failure.traceback, _TRACEBACK_LINES))
        for rank, stack in failure.stacks:
            lines += _details(f"Stack of rank {rank}", "\n".join(_main_thread(stack)[:_STACK_LINES]))
    return lines


def _details(title: str, text: str) -> list[str]:
    if not text.strip():
        return []
    return [f"<details><summary>{title}</summary>", "", "```", text.rstrip(), "```", "", "</details>", ""]


def _last(text: str, lines: int) -> str:
    found = text.rstrip().splitlines()
    return "\n".join(found if len(found) <= lines else ["...", *found[-lines:]])


def _main_thread(stack: str) -> list[str]:
    return ("Current thread" + stack.split("Current thread", 1)[-1]).splitlines()
