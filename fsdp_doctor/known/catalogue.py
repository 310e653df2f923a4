"""The catalogue of known failures: what is known of a message, of a case, and of what was found in one.

The entries are in ``entries/*.toml``, a file for each group. This module imports no torch.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fsdp_doctor.errors import UsageError
from fsdp_doctor.matrix.cases import Case
from fsdp_doctor.matrix.paths import FIX
from fsdp_doctor.verdict.classification import VerdictKind

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPORTED = "reported"
_DIRECTORY = pathlib.Path(__file__).with_name("entries")
DEVICE = r"(?:cpu|cuda|npu|xpu|hpu|mps|mtia|musa|emulated|privateuseone)(?::\d+)?"
_QUOTES = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "`": "'"})
_WORD = re.compile(r"[A-Za-z_]{3,}")
# Words of any message, which make no two alike.
_COMMON = frozenset(
    {"and", "are", "device", "error", "for", "from", "has", "have", "must", "not", "should", "that"}
) | {
    *("assertionerror", "runtimeerror", "valueerror", "tensor", "tensors", "the", "this", "was", "with", "you", "your")
}
_NEAR = 0.25


@dataclass(frozen=True)
class Trigger:
    """A part of the matrix: values of axes, ``path`` among them, each also with ``*``; the other axes are free."""

    values: Mapping[str, tuple[str, ...]]

    def holds(self, case: Case) -> bool:
        """Whether the case is in that part. The fix is in none that does not name it."""
        if case.path == FIX and "path" not in self.values:
            return False
        return all(_matches(_value(case, axis), allowed) for axis, allowed in self.values.items())


def _value(case: Case, axis: str) -> str:
    value: str = case.path if axis == "path" else getattr(case.scenario, axis)
    return value


def _matches(value: str, allowed: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(value, pattern) for pattern in allowed)


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """One way in which extraction fails, with what to do.

    verdict: what it shows as in the matrix, or would.
    signatures: regular expressions over an exception's ``Type: message``, one line, any device.
    frames: further ones over the traceback, for a message that other failures share: unless one of them matches,
        the entry is no more than possible.
    check: how to see it where nothing raises; only a silent failure has it.
    symptoms: regular expressions over the doctor's own reason, for a failure that is silent elsewhere.
    triggers: the parts of the matrix in which it shows.
    torch: the versions that show it, as a version specifier; empty for all that were tried.
    evidence: the id of a case that reproduces it, or ``reported``.
    cause, remedy: sentences. code: the remedy in code.
    references: ``owner/repository#number``, or a file of torch.
    """

    id: str
    group: str
    title: str
    verdict: VerdictKind
    cause: str
    remedy: str
    evidence: str
    signatures: tuple[re.Pattern[str], ...] = ()
    frames: tuple[re.Pattern[str], ...] = ()
    check: str = ""
    symptoms: tuple[re.Pattern[str], ...] = ()
    triggers: tuple[Trigger, ...] = ()
    torch: str = ""
    frameworks: tuple[str, ...] = ()
    code: str = ""
    references: tuple[str, ...] = ()

    @property
    def reproduced(self) -> bool:
        """Whether a case of the matrix shows it."""
        return self.evidence != REPORTED

    def says(self, message: str) -> bool:
        """Whether the exception's text, or its first line, has one of its signatures."""
        texts = {one_line(message), one_line(message.split("\n", 1)[0])}
        return any(pattern.search(text) for pattern in self.signatures for text in texts)

    def shows_on(self, torch: str) -> bool:
        """Whether that version of torch shows it; any that is not known is taken to."""
        return not torch or not self.torch or SpecifierSet(self.torch).contains(Version(torch).base_version)

    def triggered_by(self, case: Case) -> bool:
        return any(trigger.holds(case) for trigger in self.triggers)


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
    entries = [entry for file in sorted(_DIRECTORY.glob("*.toml")) for entry in _read(file)]
    return tuple(entries)


def known_failure(name: str) -> KnownFailure:
    """The entry of that id. Raises UsageError with the nearest ones where there is none."""
    by_id = {entry.id: entry for entry in known_failures()}
    if name not in by_id:
        close = difflib.get_close_matches(name, by_id, n=3)
        near = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise UsageError(f"the catalogue has no entry {name!r}{near}")
    return by_id[name]


def of_message(message: str, traceback: str = "") -> tuple[list[KnownFailure], list[KnownFailure]]:
    """The entries with a signature in ``message``, an exception's ``Type: message``: those it is, those it may be.

    An entry that wants certain frames is no more than possible without them. Where frames are there, an entry that
    wanted them comes first, and what the matrix reproduces before what was only reported.
    """
    said = [entry for entry in known_failures() if entry.says(message)]
    sure = [entry for entry in said if not entry.frames or _has_frame(entry, traceback)]
    possible = [entry for entry in said if entry not in sure]
    return sorted(sure, key=lambda entry: (not entry.frames, not entry.reproduced)), possible


def of_case(case: Case, torch: str = "") -> list[KnownFailure]:
    """What is known of a case before it runs; first what it is expected to show. With nothing it should be ok.

    torch: leave out what that version does not show. What ends the extraction comes before what is wrong with its
    values, and that before what the next training step does.
    """
    triggered = [entry for entry in known_failures() if entry.triggered_by(case) and entry.shows_on(torch)]
    return sorted(triggered, key=lambda entry: (_stage(entry), -_narrowness(entry, case)))


def of_finding(case: Case, found: Found) -> KnownFailure | None:
    """The entry that a case which broke shows, if the catalogue has it."""
    said = [entry for message in found.messages for entry in of_message(message, found.traceback)[0]]
    shown = [entry for entry in known_failures() if _shows(entry, found)]
    # What was extracted comes before what the next training step said of it.
    for entries in (shown, said):
        triggered = [entry for entry in entries if entry.triggered_by(case)]
        if triggered:
            return max(triggered, key=lambda entry: _narrowness(entry, case))
    return next((entry for entry in said if not entry.triggers), None)


def nearest(message: str, count: int = 3) -> list[KnownFailure]:
    """The entries whose signatures share most words with a message that none of them is in."""
    words = _words(message)
    scored = [(_likeness(words, entry), entry) for entry in known_failures() if entry.signatures]
    close = sorted((pair for pair in scored if pair[0] >= _NEAR), key=lambda pair: -pair[0])
    return [entry for _, entry in close[:count]]


def one_line(text: str) -> str:
    """``text`` as signatures are written: one space between words, straight quotes."""
    return " ".join(text.translate(_QUOTES).split())


def _has_frame(entry: KnownFailure, traceback: str) -> bool:
    return any(pattern.search(traceback) for pattern in entry.frames)


def _shows(entry: KnownFailure, found: Found) -> bool:
    return entry.verdict == found.kind and any(
        pattern.search(reason) for pattern in entry.symptoms for reason in found.reasons
    )


def _stage(entry: KnownFailure) -> int:
    return 0 if entry.verdict in ("crash", "hang", "died", "oom") else 2 if entry.verdict == "poisoned" else 1


def _narrowness(entry: KnownFailure, case: Case) -> int:
    """How much the trigger names that holds, the path above all: of two entries the narrower one says more."""
    return max(
        len(trigger.values) + 2 * ("path" in trigger.values) for trigger in entry.triggers if trigger.holds(case)
    )


def _words(text: str) -> set[str]:
    return {word for word in map(str.lower, _WORD.findall(text)) if word not in _COMMON}


def _likeness(words: set[str], entry: KnownFailure) -> float:
    """The share of a signature's words that the message has, two at least, of the signature that has most."""
    wanted = [_words(pattern.pattern.replace(DEVICE, "")) for pattern in entry.signatures]
    return max((len(words & some) / len(some) for some in wanted if len(words & some) > 1), default=0.0)


def _read(file: pathlib.Path) -> Iterator[KnownFailure]:
    for fields in tomllib.loads(file.read_text(encoding="utf-8"))["failure"]:
        yield _entry(file.stem.partition("_")[2], fields)


def _entry(group: str, fields: dict[str, Any]) -> KnownFailure:
    """One table of the file: every key of it is a field, and each is read as what it holds."""
    return KnownFailure(group=group, **{name: _READ.get(name, str)(value) for name, value in fields.items()})


def _prose(text: str) -> str:
    return " ".join(text.split())


def _triggers(rows: list[dict[str, str | list[str]]]) -> tuple[Trigger, ...]:
    return tuple(Trigger({axis: _tuple(allowed) for axis, allowed in row.items()}) for row in rows)


def _tuple(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _pattern(text: str) -> re.Pattern[str]:
    """A signature's ``<device>`` is any device name, with or without its index."""
    return re.compile(one_line(text).replace("<device>", DEVICE))


def _patterns(texts: list[str]) -> tuple[re.Pattern[str], ...]:
    return tuple(map(_pattern, texts))


_READ: dict[str, Callable[[Any], Any]] = {
    "signatures": _patterns,
    "symptoms": _patterns,
    "frames": _patterns,
    "triggers": _triggers,
    "frameworks": tuple,
    "references": tuple,
    "cause": _prose,
    "remedy": _prose,
    "check": _prose,
}
