"""Renders a report for GitHub Actions: annotations for unexpected results, and the summary of the job."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from fsdp_doctor.errors import DoctorFault
from fsdp_doctor.report import markdown
from fsdp_doctor.report.document import Report
from fsdp_doctor.report.layout import summarize
from fsdp_doctor.text import make_printable

# GitHub shows at most ten errors of a step, and accepts at most one mebibyte of its summary.
_MOST_ANNOTATIONS = 10
_SUMMARY_BYTES = 1024 * 1024
_VARIABLE = "GITHUB_STEP_SUMMARY"
_TITLE = "fsdp-doctor"


def render_workflow_commands(report: Report, unexpected: Sequence[str]) -> str:
    """Renders an error command for each unexpected verdict, and a notice with the summary.

    There are at most as many errors as GitHub shows.
    """
    errors = list(unexpected)
    if not report.complete:
        errors.insert(0, f"the run is incomplete: {report.ended or 'still running'}")
    if len(errors) > _MOST_ANNOTATIONS:
        num_more = len(errors) - (_MOST_ANNOTATIONS - 1)
        errors = [
            *errors[: _MOST_ANNOTATIONS - 1],
            f"and {num_more} more, which are listed in the log and in the job's summary",
        ]
    commands = [*(_render_command("error", text) for text in errors), _render_command("notice", summarize(report))]
    return "\n".join(commands) + "\n"


def _render_command(kind: str, text: str) -> str:
    """Renders a workflow command, which is one line with line ends and ``%`` escaped."""
    escaped = make_printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{kind} title={_TITLE}::{escaped}"


def render_step_summary(report: Report, unexpected: Sequence[str], num_bytes: int = _SUMMARY_BYTES) -> str:
    """Renders Markdown of at most ``num_bytes`` in UTF-8: first the unexpected results, then the report."""
    body = make_printable(markdown.render(report)).rstrip("\n") + "\n"
    head = f"## {_TITLE}: {f'{len(unexpected)} unexpected' if unexpected else 'nothing unexpected'}\n\n"
    room = max(num_bytes - _count_bytes(head + body) - 200, num_bytes // 2)
    text = f"{head}{_render_items(unexpected, room)}\n{body}"
    if _count_bytes(text) <= num_bytes:
        return text
    return text.encode()[: max(0, num_bytes)].decode(errors="ignore").rpartition("\n")[0] + "\n"


def write_step_summary(report: Report, unexpected: Sequence[str]) -> None:
    """Appends the summary to the file that GitHub's environment variable names, if the variable is set.

    Raises DoctorFault if the file cannot be written.
    """
    name = os.environ.get(_VARIABLE)
    if not name:
        return
    file = pathlib.Path(name)
    try:
        size = file.stat().st_size if file.exists() else 0
        with open(file, "a", encoding="utf-8") as opened:
            opened.write(render_step_summary(report, unexpected, _SUMMARY_BYTES - size))
    except OSError as error:
        raise DoctorFault(f"cannot write the summary of the job, {name}: {error.strerror or error}") from None


def _render_items(unexpected: Sequence[str], num_bytes: int) -> str:
    """Renders a list of the unexpected results, as many as fit."""
    lines: list[str] = []
    for number, text in enumerate(unexpected):
        # Rendered as code, so that GitHub does not read any part of it as Markdown or as a mention.
        one_line = " ".join(make_printable(text).split())
        line = f"- `` {one_line} ``\n" if "`" in one_line else f"- `{one_line}`\n"
        num_bytes -= _count_bytes(line)
        if num_bytes < 0:
            lines.append(f"- and {len(unexpected) - number} more, which are listed in the log\n")
            break
        lines.append(line)
    return "".join(lines)


def _count_bytes(text: str) -> int:
    return len(text.encode())
