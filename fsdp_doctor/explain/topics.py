"""Finds the topic of a message about FSDP that shows no mechanism, and the command that shows more."""

from __future__ import annotations

import functools

import msgspec

from fsdp_doctor.explain.tables import read_table, shows_any


class Topic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A subject of a message. ``topics.toml`` explains the fields."""

    noun: str
    shown: tuple[str, ...]
    decide: str


def find_topic(text: str) -> Topic | None:
    """Returns the first topic that the text names; None if it names none."""
    return next((topic for topic in _read_topics() if shows_any(topic.shown, text)), None)


@functools.cache
def _read_topics() -> tuple[Topic, ...]:
    table = read_table("topics.toml")
    return tuple(msgspec.convert(row, Topic) for row in table["topic"])
