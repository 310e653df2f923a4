"""One line for each case, never cut: for logs, pipes and grep."""

from __future__ import annotations

from fsdp_doctor.report.document import CaseResult, Report
from fsdp_doctor.report.layout import bytes_text, fixes, seconds_text


def render(report: Report) -> str:
    fix_of = fixes(report)
    return "".join(_line(result, fix_of.get(result.case)) + "\n" for result in report.results)


def _line(result: CaseResult, fix: CaseResult | None) -> str:
    verdict = result.verdict
    parts = [result.id, verdict.kind, seconds_text(result.seconds), bytes_text(result.peak_extra_bytes)]
    if fix is not None and fix is not result:
        parts += ["fix", fix.verdict.kind, seconds_text(fix.seconds), bytes_text(fix.peak_extra_bytes)]
    if result.confirmation is not None:
        parts.append("confirmed" if result.confirmed else f"not confirmed: then {result.confirmation.kind}")
    parts += [_one_line(text) for text in (verdict.reason, *verdict.also) if text]
    parts += [f"known: {result.known}"] if result.known else []
    return "\t".join(parts)


def _one_line(text: str) -> str:
    return " ".join(text.split())
