"""Finds the command that shows more about a word in a message of FSDP, if the message shows no mechanism."""

from __future__ import annotations

import functools
import re

import msgspec

from fsdp_doctor.explain.tables import compile_pattern, read_table

# A name of a file, which may have any words.
_FILE = re.compile(r"\S*\w/\w\S*|\w+\.py\b\S*")


class Topic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Words of a message, and the command that shows more. ``topics.toml`` explains the fields."""

    shown: tuple[str, ...]
    decide: str


def write_topic(text: str) -> str:
    """Quotes the first word in the text that has a topic, and adds the topic's command; empty without a topic."""
    words = _FILE.sub(" ", text)
    for topic in _read_topics():
        for pattern in topic.shown:
            if match := compile_pattern(pattern).search(words):
                return f'The message has the word "{match[0]}". {topic.decide}'
    return ""


@functools.cache
def _read_topics() -> tuple[Topic, ...]:
    table = read_table("topics.toml")
    return tuple(msgspec.convert(row, Topic) for row in table["topic"])
