"""An explanation as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from fsdp_doctor.explain.cause import Explanation, Group
from fsdp_doctor.explain.exceptions import Raised
from fsdp_doctor.known.catalogue import KnownFailure

_SHOWN_RANKS = 8
_SHOWN_LINES = 6
_SHOWN_OTHERS = 3
_ATTACH = (
    "the whole traceback of the rank that failed first",
    "`fsdp-doctor env`, from the same environment",
    "`fsdp-doctor probe --fix --markdown report.md`, from the same machine",
    "the configuration, or what `fsdp-doctor check CONFIG` makes of it",
)


def as_text(found: Explanation, width: int) -> str:
    """width: in columns. Code and commands are not wrapped."""
    lines = _cause(found) + _notes(found)
    if found.entry is not None:
        lines += ["", *entry_lines(found.entry, width)]
        lines += _listed("Other entries with the same message:", found.possible)
    else:
        lines += _not_known(found)
        lines += ["", "To report it, attach:", *(f"  - {what}" for what in _ATTACH)]
    return "\n".join(lines) + "\n"


def as_json(found: Explanation) -> str:
    cause = found.cause
    return json.dumps(
        {
            "schema": "fsdp-doctor/explanation",
            "schema_version": 1,
            "matched": found.entry is not None,
            "cause": _cause_as_dict(cause) if cause is not None else None,
            "only_consequences": found.only_consequences,
            "entry": entry_as_dict(found.entry) if found.entry is not None else None,
            "possible": [entry.id for entry in found.possible],
            "near": [entry.id for entry in found.near],
            "consequences": found.consequences,
            "others": [{"text": one.text, "file": one.file, "line": one.line} for one in found.others[:_SHOWN_OTHERS]],
            "torchrun": found.summary.sentence if found.summary is not None else None,
            "attach": list(_ATTACH) if found.entry is None else [],
        },
        indent=1,
    )


def entry_lines(entry: KnownFailure, width: int) -> list[str]:
    """One entry of the catalogue, whole."""
    lines = [f"{entry.id}: {entry.title}", ""]
    lines += _wrapped(f"Cause: {entry.cause}", width)
    lines += _wrapped(f"Remedy: {entry.remedy}", width)
    if entry.code:
        lines += ["", *(f"    {line}" for line in entry.code.strip("\n").splitlines()), ""]
    if entry.check:
        lines += _wrapped(f"How to see it: {entry.check}", width)
    if entry.torch:
        lines += [f"torch: {entry.torch}"]
    if entry.frameworks:
        lines += _wrapped(f"Seen in: {', '.join(entry.frameworks)}", width)
    lines += _wrapped(f"References: {', '.join(entry.references)}", width)
    lines += [reproduction(entry)]
    return lines


def entry_as_dict(entry: KnownFailure) -> dict[str, Any]:
    return {
        "id": entry.id,
        "title": entry.title,
        "verdict": entry.verdict,
        "signatures": [pattern.pattern for pattern in entry.signatures],
        "check": entry.check,
        "torch": entry.torch,
        "frameworks": list(entry.frameworks),
        "cause": entry.cause,
        "remedy": entry.remedy,
        "code": entry.code.strip("\n"),
        "references": list(entry.references),
        "evidence": entry.evidence,
        "command": _command(entry),
    }


def reproduction(entry: KnownFailure) -> str:
    """The command that reproduces it, or that there is none."""
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


def _cause(found: Explanation) -> list[str]:
    if found.cause is None:
        ended = f" {found.summary.sentence}." if found.summary is not None else ""
        return [f"There is no exception in the log.{ended}"]
    group = found.cause
    heading = "Root cause"
    if found.only_consequences:
        heading = "The log has only consequences of a failure elsewhere; the first of them"
    lines = [f"{heading}: {_where(group.first)}{_who(group)}", ""]
    shown = group.first.text.splitlines()
    lines += [f"    {line.strip()}" for line in shown[:_SHOWN_LINES]]
    lines += ["    ..."] if len(shown) > _SHOWN_LINES else []
    lines += [f"      at {frame}" for frame in _telling_frames(group.first)]
    return lines


def _notes(found: Explanation) -> list[str]:
    lines = []
    if found.only_consequences:
        lines.append(
            "The rank that failed or hung first is not in this log: look at its own log, and at every rank's stack."
        )
    for other in found.others[:_SHOWN_OTHERS]:
        lines.append(f"Probably not the cause: {(other.text.splitlines() or [''])[0][:200]} ({_where(other)})")
    if (more := max(0, len(found.others) - _SHOWN_OTHERS) + found.dropped) > 0:
        lines.append(f"and {more} more exceptions")
    for name, count in found.consequences.items():
        lines.append(f"Consequence: {name} ({count} times)" if count > 1 else f"Consequence: {name}")
    if found.summary is not None and found.cause is not None:
        lines.append(f"{found.summary.sentence}.")
    return ["", *lines] if lines else []


def _not_known(found: Explanation) -> list[str]:
    if found.cause is None:
        return []
    if found.possible:
        lines = ["", "No entry of the catalogue matches it for certain."]
        return lines + _listed("Entries with the same message (`fsdp-doctor explain --entry ID`):", found.possible)
    lines = ["", "It is not in the catalogue of known failures."]
    return lines + _listed("Entries with a similar message, which may have another cause:", found.near)


def _listed(heading: str, entries: tuple[KnownFailure, ...]) -> list[str]:
    return ["", heading, *(f"  {entry.id}: {entry.title}" for entry in entries)] if entries else []


def _who(group: Group) -> str:
    """The ranks that raised it, or how often it was raised; nothing where it was once and nothing says by whom."""
    named = sorted((source for source in group.sources if source), key=_natural)
    if not named:
        return f" ({group.count} times)" if group.count > 1 else ""
    more = f" and {len(named) - _SHOWN_RANKS} more" if len(named) > _SHOWN_RANKS else ""
    return f" ({', '.join(named[:_SHOWN_RANKS])}{more})"


def _natural(source: str) -> tuple[str, int]:
    word, _, number = source.partition(" ")
    first = number.split(" ")[0]
    return word, int(first) if first.isdigit() else 0


def _where(raised: Raised) -> str:
    return f"{raised.file}, line {raised.line}"


def _telling_frames(raised: Raised) -> list[str]:
    """The innermost frame, and before it the innermost one that is not torch's."""
    own = [frame for frame in raised.frames if "/torch/" not in frame and 'File "torch/' not in frame]
    return list(dict.fromkeys([*own[-1:], *raised.frames[-1:]]))


def _cause_as_dict(group: Group) -> dict[str, Any]:
    first = group.first
    return {
        "type": first.type,
        "message": first.message,
        "file": first.file,
        "line": first.line,
        "source": first.source,
        "sources": sorted(filter(None, group.sources), key=_natural),
        "count": group.count,
        "time": first.time,
        "frames": first.frames,
    }


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width=max(40, width), break_long_words=False, break_on_hyphens=False)
