"""Finds the circumstances of a job that a log names, and what each circumstance can mean for a failure."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import msgspec

from fsdp_doctor.explain.tables import read_table, shows_any

# Greatest number of possible causes in a sentence.
_SHOWN = 4


class Circumstance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A circumstance of a job. ``circumstances.toml`` explains the fields."""

    name: str
    shown: tuple[str, ...]
    means: Mapping[str, str]


@functools.cache
def read_circumstances() -> tuple[Circumstance, ...]:
    table = read_table("circumstances.toml")
    return tuple(msgspec.convert(row, Circumstance) for row in table["circumstance"])


def find_causes(text: str, subjects: Sequence[str]) -> tuple[list[str], list[str]]:
    """Finds the circumstances in a text that can mean something for one of the subjects.

    Returns the names of the circumstances, and what they can mean, each only once.
    """
    names: list[str] = []
    causes: list[str] = []
    for circumstance in read_circumstances():
        means = next((circumstance.means[subject] for subject in subjects if subject in circumstance.means), "")
        if means and shows_any(circumstance.shown, text):
            names.append(circumstance.name)
            if means not in causes:
                causes.append(means)
    return names, causes


def join_causes(causes: Sequence[str]) -> str:
    """Writes the first few of the possible causes as a sentence; empty without causes."""
    shown = list(dict.fromkeys(causes))[:_SHOWN]
    if not shown:
        return ""
    if len(shown) == 1:
        return f"It can be that {shown[0]}."
    return "It can be that " + "; ".join(f"({number}) {cause}" for number, cause in enumerate(shown, 1)) + "."
