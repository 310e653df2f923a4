"""Facts about a run that its log can show besides the exception: whether FSDP is in use, and how it is set up."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ClueName: TypeAlias = Literal[
    "fsdp", "dtensor", "sharded place", "cpu offload", "unsharded group", "whole parameter", "low-bit optimizer",
    "another engine", "sharding by transformers", "tensor parallelism by transformers",
]  # fmt: skip

_TORCH = re.compile(
    r"\b(?:[Pp]y)?[Tt]orch(?: version)?(?: \(GPU\?\))?\s{0,20}(?:==|=|:|\bis\b)?\s{0,20}v?(\d\.\d{1,2}(?:\.\d{1,2})?)\b"
)
# How far around a hint, and how many times in one piece, a log is searched.
_AROUND = 200
_MAX_PLACES = 32


class Clue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fact about the run. ``clues.toml`` explains the fields."""

    fact: str
    shown: re.Pattern[str]
    hints: tuple[str, ...]
    ask: str


CLUES: Mapping[ClueName, Clue] = msgspec.convert(
    tomllib.loads(pathlib.Path(__file__).with_name("clues.toml").read_text(encoding="utf-8")),
    dict[ClueName, Clue],
    dec_hook=lambda _, patterns: re.compile("|".join(patterns)),
)


class LogClues:
    """The facts that the log has shown so far, and the version of torch that it names."""

    def __init__(self) -> None:
        self.shown: set[ClueName] = set()
        self.torch = ""

    def read(self, text: str) -> None:
        """Reads the next piece of the log."""
        for name, clue in CLUES.items():
            if name not in self.shown and _search_around(clue.shown, clue.hints, text):
                self.shown.add(name)
        if not self.torch and (match := _search_around(_TORCH, ("orch",), text)):
            self.torch = match[1]


def _search_around(pattern: re.Pattern[str], hints: Sequence[str], text: str) -> re.Match[str] | None:
    """Returns the first match of the pattern near one of the hints; None if there is none."""
    for hint in hints:
        at = text.find(hint)
        for _ in range(_MAX_PLACES):
            if at < 0:
                break
            if match := pattern.search(text, max(0, at - _AROUND), at + _AROUND):
                return match
            at = text.find(hint, at + _AROUND)
    return None
