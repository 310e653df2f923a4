"""One entry of the catalogue as text and as JSON."""

from __future__ import annotations

import textwrap
from typing import Any

from fsdp_doctor.known.catalogue import KnownFailure
from fsdp_doctor.known.clues import CLUES

# The page of the runs over versions, in the documentation that pyproject.toml names.
_PAGE = "https://fsdp-doctor.github.io/fsdp-doctor/compat/index.html"


def entry_lines(entry: KnownFailure, width: int) -> list[str]:
    """The lines of the whole entry, of at most ``width`` columns."""
    lines = [f"{entry.id}: {entry.title}", ""]
    lines += wrap(f"Cause: {entry.cause}", width)
    lines += wrap(f"Remedy: {entry.remedy}", width)
    if entry.code:
        lines += ["", *(f"    {line}" for line in entry.code.strip("\n").splitlines()), ""]
    if entry.check:
        lines += wrap(f"How to see it: {entry.check}", width)
    if entry.needs:
        lines += wrap(f"Only if {', and '.join(CLUES[name].fact for name in entry.needs)}.", width)
    if entry.torch:
        lines += [f"torch: {entry.torch}"]
    if entry.measured:
        lines += wrap(f"Measured with torch, by device: {'; '.join(entry.measured)}", width)
    if entry.frameworks:
        lines += wrap(f"Seen in: {', '.join(entry.frameworks)}", width)
    lines += wrap(f"References: {', '.join(entry.references)}", width)
    lines += [_reproduction_line(entry), f"Versions: {_PAGE}#entry-{entry.id}"]
    return lines


def entry_as_dict(entry: KnownFailure) -> dict[str, Any]:
    return {
        "id": entry.id,
        "title": entry.title,
        "verdict": entry.verdict,
        "signatures": [pattern.pattern for pattern in entry.signatures],
        "needs": [CLUES[name].fact for name in entry.needs],
        "check": entry.check,
        "torch": entry.torch,
        "measured": list(entry.measured),
        "frameworks": list(entry.frameworks),
        "cause": entry.cause,
        "remedy": entry.remedy,
        "code": entry.code.strip("\n"),
        "references": list(entry.references),
        "evidence": entry.evidence,
        "command": _command(entry),
    }


def wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width=max(40, width), break_long_words=False, break_on_hyphens=False)


def _reproduction_line(entry: KnownFailure) -> str:
    """The command that reproduces it, or a sentence that there is none."""
    command = _command(entry)
    return (
        f"Reproduce: {command}"
        if command
        else "Reproduce: no case of the matrix shows it; it is known from the references above."
    )


def _command(entry: KnownFailure) -> str:
    if not entry.reproduced:
        return ""
    device = f" --device {entry.evidence_device}" if entry.evidence_device else ""
    return f"fsdp-doctor probe{device} --case '{entry.evidence}'"
