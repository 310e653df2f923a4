"""Says what a message of FSDP's is about and which command says more, where the message shows no mechanism."""

from __future__ import annotations

import functools
import pathlib
import sys

import msgspec

from fsdp_doctor.explain.circumstances import compile_pattern

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Topic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a message is about. ``topics.toml`` explains the fields."""

    noun: str
    shown: tuple[str, ...]
    decide: str

    def is_named(self, text: str) -> bool:
        return any(compile_pattern(pattern).search(text) for pattern in self.shown)


def find_topic(text: str) -> Topic | None:
    """Returns the first topic that the text names; None if it names none."""
    return next((topic for topic in _read_topics() if topic.is_named(text)), None)


@functools.cache
def _read_topics() -> tuple[Topic, ...]:
    table = tomllib.loads(pathlib.Path(__file__).with_name("topics.toml").read_text(encoding="utf-8"))
    return tuple(msgspec.convert(row, Topic) for row in table["topic"])
