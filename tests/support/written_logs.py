"""Logs that a test writes, and their explanations."""

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


def entry_of(explanation: Explanation) -> str:
    """The id of the catalogue's entry that explains it for certain."""
    return explanation.entry.id if explanation.entry is not None else ""
