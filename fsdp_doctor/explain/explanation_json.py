"""An explanation as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from fsdp_doctor.explain.cause import Explanation
from fsdp_doctor.explain.entry_text import entry_as_dict
from fsdp_doctor.explain.exception_groups import Group
from fsdp_doctor.explain.text import ATTACH, attach, natural
from fsdp_doctor.known.grading import Match

_SHOWN_OTHERS = 3
_SHOWN_WAITING = 256


def as_json(found: Explanation) -> str:
    return json.dumps(
        {
            "schema": "fsdp-doctor/explanation",
            "schema_version": 2,
            "showing": found.showing,
            "matched": found.entry is not None,
            "grade": found.grade,
            "cause": _cause(found.cause) if found.cause is not None else None,
            "entry": entry_as_dict(found.entry) if found.entry is not None else None,
            "matches": [_match(match) for match in found.matches],
            "near": [entry.id for entry in found.near],
            "ours": found.ours,
            "foreign": found.foreign,
            "hang": _hang(found),
            "consequences": found.consequences,
            "others": [{"text": one.text, "file": one.file, "line": one.line} for one in found.others[:_SHOWN_OTHERS]],
            "torchrun": found.summary.sentence if found.summary is not None else None,
            "attach": list(ATTACH) if attach(found) else [],
            "truncated": list(found.truncated),
        },
        indent=1,
    )


def _match(match: Match) -> dict[str, Any]:
    return {"id": match.entry.id, "grade": match.grade, "open": list(match.open), **_advice(match)}


def _advice(match: Match) -> dict[str, str]:
    return {"title": match.entry.title, "cause": match.entry.cause, "remedy": match.entry.remedy}


def _hang(found: Explanation) -> dict[str, Any] | None:
    if found.hang is None:
        return None
    return {
        "parting": list(found.hang.parting),
        "waiting": [{**dataclasses.asdict(one), "call": one.call} for one in found.hang.waiting[:_SHOWN_WAITING]],
    }


def _cause(group: Group) -> dict[str, Any]:
    first = group.first
    return {
        "type": first.type,
        "message": first.message,
        "file": first.file,
        "line": first.line,
        "source": first.source,
        "sources": sorted(filter(None, group.sources), key=natural),
        "count": group.count,
        "time": first.time,
        "frames": first.frames,
    }
