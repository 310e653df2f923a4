"""Reads the table of mechanisms by which jobs fail, and applies a mechanism to a text."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import msgspec

from fsdp_doctor.explain.tables import read_table

# Least and greatest factor between the numbers of ranks of two jobs.
_RANKS = (2, 512)


class Mechanism(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way in which two facts of a job contradict each other. ``mechanisms.toml`` explains the fields."""

    shown: tuple[re.Pattern[str], ...]
    clash: str
    decide: str
    symptom: bool = False
    alone: bool = False
    vague: bool = False
    told: bool = False
    subjects: tuple[str, ...] = ()
    place: re.Pattern[str] | None = None
    placeless: bool = False
    code: re.Pattern[str] | None = None
    ratio: int = 0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Facts that the log shows about a failure or a symptom.

    clash: the contradiction, as a sentence without its full stop; empty if none was recognized.
    decide: the command or the question that would lead to the cause; empty if there is none.
    who: the library that raised the exception; empty if no frame shows it.
    when: the phase of the job; empty if no frame shows it.
    called: the line of the job that led to the exception; empty if the log does not have it.
    lines: the places in the log from which these facts were read.
    vague: whether a symptom in the same log would say more.
    subjects: the keys under which circumstances.toml has the causes for this failure.
    """

    clash: str
    decide: str
    who: str = ""
    when: str = ""
    called: str = ""
    lines: tuple[str, ...] = ()
    vague: bool = False
    subjects: tuple[str, ...] = ()


@functools.cache
def read_mechanisms() -> tuple[Mechanism, ...]:
    table = read_table("mechanisms.toml")
    return tuple(
        msgspec.convert(row, Mechanism, dec_hook=lambda _, text: re.compile(text)) for row in table["mechanism"]
    )


def apply_mechanism(mechanism: Mechanism, text: str) -> tuple[str, str] | None:
    """Returns a mechanism's contradiction and deciding step, with facts of the text; None if the text shows neither."""
    match = next((match for pattern in mechanism.shown if (match := pattern.search(text))), None)
    if match is None:
        return None
    facts = {name: (value or "").strip() for name, value in match.groupdict().items()}
    a, b = facts.get("a", ""), facts.get("b", "")
    if a.isdecimal() and b.isdecimal():
        facts["difference"] = str(abs(int(a) - int(b)))
        facts["ratio"] = _find_ratio(int(a), int(b), mechanism.ratio) if mechanism.ratio else ""
    if mechanism.ratio and not facts.get("ratio"):
        return None
    return mechanism.clash.format_map(facts), mechanism.decide.format_map(facts)


def _find_ratio(a: int, b: int, fewest: int) -> str:
    """Returns the number of ranks by which the smaller size must be multiplied to give the larger size.

    The product may differ from the larger size by one padding element for each rank. Returns an empty text if no
    number of ranks explains the two sizes.

    fewest: the smallest shard that counts.
    """
    small, large = sorted((a, b))
    if small < fewest:
        return ""
    times = round(large / small)
    return str(times) if _RANKS[0] <= times <= _RANKS[1] and abs(large - times * small) <= times else ""
