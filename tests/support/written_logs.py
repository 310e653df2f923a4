"""Logs that a test writes, line by line, and what ``explain`` makes of them."""

from __future__ import annotations

import pathlib

from fsdp_doctor.explain import Explanation, explain

UNSHARD = "AssertionError: Expects tensor to be on the compute device cuda:{}, was on cpu"
DURING = "During handling of the above exception, another exception occurred:"
BEGIN = "Traceback (most recent call last):"


def explained(tmp_path: pathlib.Path, lines: list[str] | str) -> Explanation:
    file = tmp_path / "log.txt"
    file.write_text(lines if isinstance(lines, str) else "\n".join(lines) + "\n", encoding="utf-8")
    return explain([file])


def entry_of(found: Explanation) -> str:
    """The entry that it is for certain."""
    return found.entry.id if found.entry is not None else ""
