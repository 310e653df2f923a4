"""The catalogue of known failures, ``entries/*.toml``, and the entries for a message, a case, or a case that broke.

This module imports no torch.
"""

from __future__ import annotations

import difflib
import functools
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from packaging.specifiers import SpecifierSet

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known.failures import KnownFailure, RankRange, Trigger
from fsdp_doctor.known.run_context import DeviceKind, RunContext
from fsdp_doctor.known.signatures import DEVICE, anchor, compiled, readings
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.verdict.classification import PROBLEM_ORDER, VerdictKind

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DIRECTORY = pathlib.Path(__file__).with_name("entries")
_WORD = re.compile(r"[A-Za-z_]{3,}")
# Words of any message, which make no two alike.
_COMMON = frozenset(
    {"and", "are", "device", "error", "for", "from", "has", "have", "must", "not", "should", "that"}
) | {
    *("assertionerror", "runtimeerror", "valueerror", "tensor", "tensors", "the", "this", "was", "with", "you", "your")
}
_LEAST_LIKENESS = 0.5


@dataclass(frozen=True, kw_only=True)
class Found:
    """A case that broke: the reason of its verdict, and the ranks' exceptions."""

    kind: VerdictKind
    reasons: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    traceback: str = ""


@functools.cache
def known_failures() -> tuple[KnownFailure, ...]:
    """All entries, a file of them for each group, in order. Raises TypeError for a key that an entry does not have."""
    return tuple(
        KnownFailure(
            group=file.stem.partition("_")[2],
            **{name: _PARSE.get(name, str)(value) for name, value in fields.items()},
        )
        for file in sorted(DIRECTORY.glob("*.toml"))
        for fields in tomllib.loads(file.read_text(encoding="utf-8"))["failure"]
    )


def known_failure(name: str) -> KnownFailure:
    """The entry of that id. Raises UsageError with the nearest ones where there is none."""
    by_id = {entry.id: entry for entry in known_failures()}
    if name not in by_id:
        close = difflib.get_close_matches(name, by_id, n=3)
        near = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise UsageError(f"the catalogue has no entry {name!r}{near}")
    return by_id[name]


@functools.lru_cache(maxsize=1024)
def has_signature(text: str) -> bool:
    """Whether an entry has a signature in ``text``."""
    return any(
        literal in reading and pattern.search(reading)
        for reading in readings(text)
        for literal, pattern in _signatures()
    )


@functools.cache
def _signatures() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """All signatures with their anchors, each once."""
    return tuple(dict.fromkeys((anchor(pattern), pattern) for e in known_failures() for pattern in e.signatures))


def anchors() -> list[str]:
    """The literal pieces of signatures; a line with a signature has one of them in it."""
    return sorted({literal for literal, _ in _signatures()} - {""})


def match_message(message: str, traceback: str = "") -> tuple[list[KnownFailure], list[KnownFailure]]:
    """The entries with a signature in ``message``, an exception's ``Type: message``: the sure ones, the possible ones.

    An entry that wants certain frames is no more than possible without them. Where frames are there, an entry that
    wanted them comes first, and what the matrix reproduces before what was only reported.
    """
    entries = [entry for entry in known_failures() if entry.matches_message(message)]
    sure = [entry for entry in entries if not entry.frames or entry.has_frame(traceback)]
    possible = [entry for entry in entries if entry not in sure]
    return sorted(sure, key=lambda entry: (not entry.frames, not entry.reproduced)), possible


def expected_failures(case: AnyCase, context: RunContext) -> list[KnownFailure]:
    """The entries that a case of such a run is expected to show, the first to show first; none for a case that is ok.

    What ends the path comes before what is wrong with its values, and that before what the next training step does.
    """
    expected = [entry for entry in known_failures() if entry.is_expected_in(case, context)]
    return sorted(expected, key=lambda entry: (_stage(entry), -entry.narrowness(case, context)))


def expected_outcomes(case: AnyCase, context: RunContext) -> tuple[KnownFailure | None, ...]:
    """The outcomes that a case of such a run may have, None for an ok: one where it is certain, several where not.

    A failure that is certain ends the list; before it are those that come first where a race is lost.
    """
    outcomes: list[KnownFailure | None] = []
    for entry in expected_failures(case, context):
        outcomes.append(entry)
        if entry.is_certain_in(case, context):
            return tuple(outcomes)
    return (*outcomes, None)


def of_finding(case: AnyCase, found: Found, context: RunContext) -> KnownFailure | None:
    """The entry that a case which broke shows, on this torch or on another; None where the catalogue has none."""
    by_message = [entry for message in found.messages for entry in match_message(message, found.traceback)[0]]
    by_symptom = [entry for entry in known_failures() if _has_symptom(entry, found)]
    # What was extracted comes before what the next training step said of it.
    for entries in (by_symptom, by_message):
        triggered = [entry for entry in entries if entry.is_triggered_by(case, context)]
        if triggered:
            return max(triggered, key=lambda entry: entry.narrowness(case, context))
    return next((entry for entry in by_message if not entry.triggers), None)


def nearest(message: str, count: int = 3) -> list[KnownFailure]:
    """The entries whose signatures share most words with a message that none of them matches."""
    words = _words(message)
    scored = [(_likeness(words, entry), entry) for entry in known_failures() if entry.signatures]
    close = sorted((pair for pair in scored if pair[0] >= _LEAST_LIKENESS), key=lambda pair: -pair[0])
    return [entry for _, entry in close[:count]]


def _has_symptom(entry: KnownFailure, found: Found) -> bool:
    return entry.verdict == found.kind and any(
        pattern.search(reason) for pattern in entry.symptoms for reason in found.reasons
    )


def _stage(entry: KnownFailure) -> int:
    """When it shows: what ends the path comes first, then the problems in the order of a verdict."""
    order: tuple[str, ...] = PROBLEM_ORDER
    return 1 + order.index(entry.verdict) if entry.verdict in order else 0


def _words(text: str) -> set[str]:
    return {word for word in map(str.lower, _WORD.findall(text)) if word not in _COMMON}


def _likeness(words: set[str], entry: KnownFailure) -> float:
    """The largest share of a signature's words that the message has, of signatures that share at least two."""
    signatures = [_words(pattern.pattern.replace(DEVICE, "")) for pattern in entry.signatures]
    return max((len(words & other) / len(other) for other in signatures if len(words & other) > 1), default=0.0)


def _parse_trigger(row: dict[str, Any]) -> Trigger:
    """A row's facts about the run, each parsed as its type; every other key is an axis."""
    facts = {name: parse(row[name]) for name, parse in _PARSE_FACT.items() if name in row}
    return Trigger({axis: _parse_tuple(allowed) for axis, allowed in row.items() if axis not in _PARSE_FACT}, **facts)


def _parse_tuple(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _parse_patterns(texts: list[str]) -> tuple[re.Pattern[str], ...]:
    return tuple(map(compiled, texts))


def _parse_prose(text: str) -> str:
    return " ".join(text.split())


_PARSE_FACT: dict[str, Callable[[Any], Any]] = {
    "device": lambda value: get_args(DeviceKind) if value == "*" else _parse_tuple(value),
    "ranks": lambda table: RankRange(**table),
    "shard_group": lambda table: RankRange(**table),
    "shards": _parse_tuple,
    "direction": _parse_tuple,
}
_PARSE: dict[str, Callable[[Any], Any]] = {
    "signatures": _parse_patterns,
    "symptoms": _parse_patterns,
    "frames": _parse_patterns,
    "unless": _parse_patterns,
    "needs": tuple,
    "triggers": lambda rows: tuple(map(_parse_trigger, rows)),
    "race": bool,
    "versions": lambda table: {name: SpecifierSet(text) for name, text in table.items()},
    "frameworks": tuple,
    "measured": tuple,
    "references": tuple,
    "cause": _parse_prose,
    "remedy": _parse_prose,
    "check": _parse_prose,
}
