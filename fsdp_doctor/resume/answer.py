"""Renders the answer as text, Markdown and JSON; the summary sentence comes first."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from fsdp_doctor.resume.diagnosis import ResumeAnswer


def render_json(answer: ResumeAnswer) -> str:
    return msgspec.json.format(msgspec.json.encode(answer)).decode() + "\n"


def render_text(answer: ResumeAnswer) -> str:
    return "\n".join(_list_lines(answer)) + "\n"


def _list_lines(answer: ResumeAnswer) -> Iterator[str]:
    yield answer.sentence
    for number, finding in enumerate(answer.findings):
        if number:
            yield ""
            yield f"Also, {finding.kind}: {finding.text}."
        for place, cause in enumerate(finding.causes):
            known = f" ({cause.known})" if cause.known else ""
            yield f"  {'or' if place else 'Known cause'}: {cause.title}{known}"
            yield f"    Remedy: {cause.remedy}"
            yield from (f"    {reference}" for reference in cause.references)
    if answer.notes:
        yield ""
        yield from (f"Note: {note}." for note in answer.notes)
    yield ""
    yield from (f"{run.name}: {run.steps} steps in {run.seconds:.0f} s, {run.log}" for run in answer.runs)


def render_markdown(answer: ResumeAnswer) -> str:
    """Renders an answer for an issue: the sentence, the differences, the known causes, and the commands."""
    lines = [f"**{answer.sentence}**", ""]
    if answer.findings:
        lines += ["| step | what | difference | ranks |", "|---|---|---|---|"]
        lines += [
            f"| {each.step} | {each.kind} | {each.text.replace('|', '/')} | {', '.join(map(str, each.ranks))} |"
            for each in answer.findings
        ]
        lines.append("")
    for cause in {cause.id: cause for finding in answer.findings for cause in finding.causes}.values():
        lines.append(f"- Known cause: {cause.title}. {cause.remedy} {' '.join(cause.references)}".rstrip())
    lines += [f"- {note}." for note in answer.notes]
    lines += ["", f"torch {answer.torch}, {answer.device}, {', '.join(answer.frameworks) or 'no framework'}", "", "```"]
    lines += [" ".join(run.command) for run in answer.runs]
    return "\n".join([*lines, "```", ""])
