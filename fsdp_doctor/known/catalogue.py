"""The catalogue of known failures: what is known of a message, of a case, and of what was found in one.

This module imports no torch.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known import loading
from fsdp_doctor.known.failures import KnownFailure
from fsdp_doctor.known.run_context import RunContext
from fsdp_doctor.known.signatures import DEVICE, anchor, readings
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.verdict.classification import PROBLEM_ORDER, VerdictKind

_WORD = re.compile(r"[A-Za-z_]{3,}")
# Words of any message, which make no two alike.
_COMMON = frozenset(
    {"and", "are", "device", "error", "for", "from", "has", "have", "must", "not", "should", "that"}
) | {
    *("assertionerror", "runtimeerror", "valueerror", "tensor", "tensors", "the", "this", "was", "with", "you", "your")
}
_NEAR = 0.5


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a case that broke says of itself: its verdict's reason, and the ranks' exceptions."""

    kind: VerdictKind
    reasons: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    traceback: str = ""


@functools.cache
def known_failures() -> tuple[KnownFailure, ...]:
    """All entries, group after group."""
    return tuple(loading.entries())


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
    for reading in readings(text):
        for literal, pattern in _signatures():
            if literal in reading and pattern.search(reading):
                return True
    return False


@functools.cache
def _signatures() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """All signatures with their anchors, each once."""
    return tuple(dict.fromkeys((anchor(pattern), pattern) for one in known_failures() for pattern in one.signatures))


def anchors() -> list[str]:
    """The literal pieces one of which a line with a signature has in it."""
    return sorted({literal for literal, _ in _signatures()} - {""})


def of_message(message: str, traceback: str = "") -> tuple[list[KnownFailure], list[KnownFailure]]:
    """The entries with a signature in ``message``, an exception's ``Type: message``: those it is, those it may be.

    An entry that wants certain frames is no more than possible without them. Where frames are there, an entry that
    wanted them comes first, and what the matrix reproduces before what was only reported.
    """
    said = [entry for entry in known_failures() if entry.says(message)]
    sure = [entry for entry in said if not entry.frames or entry.has_frame(traceback)]
    possible = [entry for entry in said if entry not in sure]
    return sorted(sure, key=lambda entry: (not entry.frames, not entry.reproduced)), possible


def of_case(case: AnyCase, context: RunContext) -> list[KnownFailure]:
    """What is known of a case of such a run before it runs; first what it is expected to show. With nothing it is ok.

    What ends the path comes before what is wrong with its values, and that before what the next training step does.
    """
    expected = [entry for entry in known_failures() if entry.expected_in(case, context)]
    return sorted(expected, key=lambda entry: (_stage(entry), -entry.narrowness(case, context)))


def foretold(case: AnyCase, context: RunContext) -> tuple[KnownFailure | None, ...]:
    """What a case of such a run may show, None for an ok: one outcome where it is certain, several where it is not.

    A failure that is certain ends the list; before it stand the ones that come first where a race is lost.
    """
    outcomes: list[KnownFailure | None] = []
    for entry in of_case(case, context):
        outcomes.append(entry)
        if entry.certain_in(case, context):
            return tuple(outcomes)
    return (*outcomes, None)


def of_finding(case: AnyCase, found: Found, context: RunContext) -> KnownFailure | None:
    """The entry that a case which broke shows, if the catalogue has it; on this torch or on another."""
    said = [entry for message in found.messages for entry in of_message(message, found.traceback)[0]]
    shown = [entry for entry in known_failures() if _shows(entry, found)]
    # What was extracted comes before what the next training step said of it.
    for entries in (shown, said):
        triggered = [entry for entry in entries if entry.triggered_by(case, context)]
        if triggered:
            return max(triggered, key=lambda entry: entry.narrowness(case, context))
    return next((entry for entry in said if not entry.triggers), None)


def nearest(message: str, count: int = 3) -> list[KnownFailure]:
    """The entries whose signatures share most words with a message that none of them is in."""
    words = _words(message)
    scored = [(_likeness(words, entry), entry) for entry in known_failures() if entry.signatures]
    close = sorted((pair for pair in scored if pair[0] >= _NEAR), key=lambda pair: -pair[0])
    return [entry for _, entry in close[:count]]


def _shows(entry: KnownFailure, found: Found) -> bool:
    return entry.verdict == found.kind and any(
        pattern.search(reason) for pattern in entry.symptoms for reason in found.reasons
    )


def _stage(entry: KnownFailure) -> int:
    """When it shows: what ends the path comes first, then the problems in the order in which a verdict tells them."""
    order: tuple[str, ...] = PROBLEM_ORDER
    return 1 + order.index(entry.verdict) if entry.verdict in order else 0


def _words(text: str) -> set[str]:
    return {word for word in map(str.lower, _WORD.findall(text)) if word not in _COMMON}


def _likeness(words: set[str], entry: KnownFailure) -> float:
    """The share of a signature's words that the message has, two at least, of the signature that has most."""
    wanted = [_words(pattern.pattern.replace(DEVICE, "")) for pattern in entry.signatures]
    return max((len(words & some) / len(some) for some in wanted if len(words & some) > 1), default=0.0)
