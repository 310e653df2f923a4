"""The catalogue of known failures, ``entries/*.toml``, with functions that find the entries for a message or a case.

This module imports no torch.
"""

from __future__ import annotations

import difflib
import functools
import pathlib
import re
import sys
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from packaging.specifiers import SpecifierSet

from fsdp_doctor.errors import UsageError
from fsdp_doctor.known.failures import KnownFailure
from fsdp_doctor.known.run_context import DeviceKind, RunContext
from fsdp_doctor.known.signatures import compile_signature, find_anchor, list_readings
from fsdp_doctor.matrix.cases import AnyCase
from fsdp_doctor.verdict.classification import PROBLEM_ORDER, VerdictKind

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DIRECTORY = pathlib.Path(__file__).with_name("entries")
# The facts of a trigger about the run; its other keys are axes.
_RUN_FACTS = ("device", "ranks", "shard_group", "shards", "direction", "versions")


# A version of a package of which a failure is said to be.
_VERSION_OF = re.compile(r"\b(peft|accelerate|transformers|trl|verl) (\d+\.\d+)")


@dataclass(frozen=True, kw_only=True)
class BrokenCase:
    """A case whose verdict is not ``ok``.

    kind: the verdict.
    reasons: the reasons of the verdict.
    messages: the ranks' exceptions, each as ``Type: message``.
    traceback: the frames of the exceptions.
    """

    kind: VerdictKind
    reasons: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    traceback: str = ""


@functools.cache
def read_catalogue() -> tuple[KnownFailure, ...]:
    """Returns all entries, in the order of the files and of the entries in them. Raises the errors of
    :func:`read_entries`.
    """
    files = sorted(DIRECTORY.glob("*.toml"))
    return tuple(entry for file in files for entry in read_entries(file.read_text(encoding="utf-8"), file.stem))


def read_entries(text: str, name: str) -> list[KnownFailure]:
    """Reads the entries of a TOML file.

    Raises ValueError that names the file, the entry and the wrong key.

    name: the name of the file without its extension: a number and the group.
    """
    entries = []
    for number, fields in enumerate(tomllib.loads(text)["failure"], 1):
        try:
            prose = {key: " ".join(fields[key].split()) for key in ("cause", "remedy", "check") if key in fields}
            triggers = [_split_trigger(row) for row in fields.get("triggers", ())]
            remedies = {name: " ".join(text.split()) for name, text in fields.get("remedies", {}).items()}
            fields |= {**prose, "remedies": remedies, "triggers": triggers, "group": name.partition("_")[2]}
            entries.append(_require_condition(msgspec.convert(fields, KnownFailure, dec_hook=_parse)))
        except (ValueError, AttributeError, re.error) as error:
            raise ValueError(f"{name}.toml, entry {fields.get('id', number)}: {error}") from None
    return entries


def _require_condition(entry: KnownFailure) -> KnownFailure:
    """Returns the entry. Raises ValueError if ``check`` names a version of a package that ``versions`` does not
    restrict.
    """
    for name, version in _VERSION_OF.findall(entry.check):
        if name not in entry.versions:
            raise ValueError(f"check names {name} {version}, but versions does not name {name}")
    return entry


def _split_trigger(row: dict[str, Any]) -> dict[str, Any]:
    """Separates the axes of a trigger from its facts about the run. A single value becomes a list."""
    listed = {key: [value] if isinstance(value, str) else value for key, value in row.items()}
    if row.get("device") == "*":
        listed["device"] = get_args(DeviceKind)
    facts = {key: listed.pop(key) for key in _RUN_FACTS if key in listed}
    return {"values": listed, **facts}


def _parse(kind: type, value: Any) -> Any:
    return SpecifierSet(value) if kind is SpecifierSet else compile_signature(value)


def find_entry(name: str) -> KnownFailure:
    """Finds an entry by its id or short code: FD014, fd014 or FD14.

    Raises UsageError, which names the nearest ids, if there is none.
    """
    entries = read_catalogue()
    if code := re.fullmatch(r"FD(\d+)", name, re.IGNORECASE):
        by_number = {int(entry.short_code.removeprefix("FD")): entry for entry in entries}
        if (number := int(code[1])) in by_number:
            return by_number[number]
        raise UsageError(f"the catalogue has no entry {name!r}; the last is {by_number[max(by_number)].short_code}")
    by_id = {entry.id: entry for entry in entries}
    if name not in by_id:
        close = difflib.get_close_matches(name, by_id, n=3)
        near = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise UsageError(f"the catalogue has no entry {name!r}{near}")
    return by_id[name]


@functools.lru_cache(maxsize=1024)
def has_signature(text: str) -> bool:
    """Returns whether a signature of any entry matches ``text``."""
    return any(
        literal in reading and pattern.search(reading)
        for reading in list_readings(text)
        for literal, pattern in _list_signatures()
    )


@functools.cache
def _list_signatures() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Lists all signatures with their anchors, each once."""
    return tuple(dict.fromkeys((find_anchor(pattern), pattern) for e in read_catalogue() for pattern in e.signatures))


@functools.cache
def list_anchors() -> tuple[str, ...]:
    """Lists the literal pieces of signatures. A line that matches a signature contains at least one of them."""
    return tuple(sorted({literal for literal, _ in _list_signatures()} - {""}))


def match_message(message: str, traceback: str = "") -> list[KnownFailure]:
    """Finds the entries with a signature in ``message`` and, if they have frames, a frame in ``traceback``.

    Entries with frames come first; after that, failures that the matrix reproduces come before failures that were only
    reported.

    message: the exception as ``Type: message``.
    """
    entries = [entry for entry in read_catalogue() if entry.matches_message(message)]
    entries = [entry for entry in entries if not entry.frames or entry.has_frame(traceback)]
    return sorted(entries, key=lambda entry: (not entry.frames, not entry.reproduced))


def list_expected_failures(case: AnyCase, context: RunContext) -> list[KnownFailure]:
    """Lists the entries that a case is expected to show in a run with these facts, in the order in which they would
    show.

    Failures that end the method come first, then wrong values, then failures of the next training step. The list is
    empty for a case that is expected to be ok.
    """
    expected = [entry for entry in read_catalogue() if entry.is_expected_in(case, context)]
    return sorted(expected, key=lambda entry: (_order_stage(entry), -entry.measure_narrowness(case, context)))


def list_expected_outcomes(case: AnyCase, context: RunContext) -> tuple[KnownFailure | None, ...]:
    """Lists the outcomes that a case may have in a run with these facts; None stands for ok.

    Several outcomes are possible where a failure depends on a race. A certain failure is the last outcome of the list,
    because nothing after it can show.
    """
    outcomes: list[KnownFailure | None] = []
    for entry in list_expected_failures(case, context):
        outcomes.append(entry)
        if entry.is_certain_in(case, context):
            return tuple(outcomes)
    return (*outcomes, None)


def find_shown_entry(case: AnyCase, broken: BrokenCase, context: RunContext) -> KnownFailure | None:
    """Finds the entry that a broken case shows, on this torch or on another; None if the catalogue has none."""
    by_message = [entry for message in broken.messages for entry in match_message(message, broken.traceback)]
    by_symptom = [
        entry
        for entry in read_catalogue()
        if entry.shows_as(broken.kind)
        and any(pattern.search(reason) for pattern in entry.symptoms for reason in broken.reasons)
    ]
    # What was extracted comes before what the next training step said of it.
    for entries in (by_symptom, by_message):
        triggered = [entry for entry in entries if entry.is_triggered_by(case, context)]
        if triggered:
            return max(triggered, key=lambda entry: entry.measure_narrowness(case, context))
    return next((entry for entry in by_message if not entry.triggers), None)


def _order_stage(entry: KnownFailure) -> int:
    """Returns a sort key: failures that end the method come first, then problems in the order ``PROBLEM_ORDER``."""
    order: tuple[str, ...] = PROBLEM_ORDER
    return 1 + order.index(entry.verdict) if entry.verdict in order else 0
