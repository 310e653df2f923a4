"""Names the rank that wrote a line, and defines what all readers of symptoms in several lines use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

RANK = re.compile(r"\[?\b(?i:rank) ?:?(?P<number>\d{1,6})\b\]?")
# Within so many lines two ranks do the same.
NEAR = 64
MAX_TRACKED = 4_096
# Greatest number of names in a sentence.
SHOWN = 8
# Sources of a line that are ranks.
_RANKS = ("rank", "local rank", "task")


class Found(NamedTuple):
    """A symptom.

    clash: the contradiction.
    decide: the question or command that would lead to the cause.
    numbers: the numbers of the lines that show the symptom.
    """

    clash: str
    decide: str
    numbers: tuple[int, ...]


def name_rank(text: str, source: str) -> str:
    """Names the rank that wrote a line: the source if it is a rank, else the rank in the text; empty without a rank."""
    if source.startswith(_RANKS):
        return source
    rank = RANK.search(text)
    return f"rank {rank['number']}" if rank else ""


def has_any(words: Sequence[str], text: str) -> bool:
    # Quicker than any() with a generator, which most lines of a log would wait for.
    for word in words:  # noqa: SIM110
        if word in text:
            return True
    return False
