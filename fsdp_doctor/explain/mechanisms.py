"""Mechanisms in which things do not fit, as data, and the reading that one of them makes of a text."""

from __future__ import annotations

import functools
import pathlib
import re
import sys
from dataclasses import dataclass

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Mechanism(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way in which things do not fit; its fields are explained in ``mechanisms.toml``."""

    shown: tuple[re.Pattern[str], ...]
    clash: str
    decide: str
    symptom: bool = False
    alone: bool = False
    vague: bool = False


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Facts that the log shows.

    who, when: empty where no frame says it. called: the line of the job that led there; empty where it is not in the
    log. lines: from which it was read, as places. vague: whether a symptom of the
    same log says more.
    """

    clash: str
    decide: str
    who: str = ""
    when: str = ""
    called: str = ""
    lines: tuple[str, ...] = ()
    vague: bool = False


@functools.cache
def read_mechanisms() -> tuple[Mechanism, ...]:
    table = tomllib.loads(pathlib.Path(__file__).with_name("mechanisms.toml").read_text(encoding="utf-8"))
    return tuple(
        msgspec.convert(row, Mechanism, dec_hook=lambda _, text: re.compile(text)) for row in table["mechanism"]
    )


def apply_mechanism(mechanism: Mechanism, text: str) -> tuple[str, str] | None:
    """Returns what clashes and what decides it, with the facts of the text; None where the text does not show it."""
    match = next((match for pattern in mechanism.shown if (match := pattern.search(text))), None)
    if match is None:
        return None
    facts = {name: value or "" for name, value in match.groupdict().items()}
    a, b = facts.get("a", ""), facts.get("b", "")
    if a.isdecimal() and b.isdecimal():
        facts["difference"] = str(abs(int(a) - int(b)))
    return mechanism.clash.format_map(facts), mechanism.decide.format_map(facts)
