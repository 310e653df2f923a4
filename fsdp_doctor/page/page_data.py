"""A merged report packed for the page: every text once, everything else as its number.

What ``cases.js`` reads: ``environments``, the columns; ``axes`` and ``paths``, the words that cases are made of;
``outcomes``, rows of (verdict, reason, message, also, entry); and ``cases``, rows of (strategy, offload, staging, other
axes, direction, path, outcome of each environment or -1, statements, whether it changed). A number of a row is a place
in the list of such words, and in ``texts`` where there is none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, get_args

from fsdp_doctor.known.catalogue import known_failures
from fsdp_doctor.known.failures import KnownFailure
from fsdp_doctor.known.signatures import DEVICE
from fsdp_doctor.matrix.axes import AXIS
from fsdp_doctor.matrix.contracts import Direction
from fsdp_doctor.verdict.classification import GOOD, NOT_RUN, VerdictKind
from fsdp_doctor.versions.merged import NOWHERE, SHORTENED, Environment, MergedCase, MergedReport, Outcome

_NO_RESULT = -1
_KINDS = get_args(VerdictKind)
_DIRECTIONS = get_args(Direction)
_AXES = ("strategy", "offload", "staging")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """An environment as the head of a column.

    torch: its version, in short. more: what tells it from another column of the same torch and device, mostly empty.
    anchor: names it in a link. packages: with their versions, and Python's. incomplete: why not all of its cases ran,
    or empty.
    """

    name: str
    torch: str
    more: str
    device: str
    anchor: str
    options: str
    packages: str
    incomplete: str


class _Numbers:
    """A list of distinct texts, each with its number."""

    def __init__(self, first: Iterable[str] = ()) -> None:
        self.texts: list[str] = []
        self._number: dict[str, int] = {}
        for text in first:
            self.number_of(text)

    def number_of(self, text: str) -> int:
        if text not in self._number:
            self._number[text] = len(self.texts)
            self.texts.append(text)
        return self._number[text]


def columns(merged: MergedReport) -> list[Column]:
    """The columns of the page, in the order of the environments."""
    return [_column(environment) for environment in merged.environments]


def page_data(merged: MergedReport) -> dict[str, Any]:
    """The data of the page, as JSON values."""
    texts = _Numbers([""])
    words = {axis: _Numbers(value for value in AXIS[axis].values if _is_used(merged, axis, value)) for axis in _AXES}
    paths = _Numbers()
    cases = [_case(case, words, paths, texts) for case in merged.cases]
    return {
        "environments": [dataclasses.asdict(column) for column in columns(merged)],
        "kinds": [*_KINDS],
        "good": [kind for kind in _KINDS if kind in GOOD],
        "bad": [kind for kind in _KINDS if kind not in GOOD | NOT_RUN],
        "axes": {axis: numbers.texts for axis, numbers in words.items()} | {"direction": [*_DIRECTIONS]},
        "paths": paths.texts,
        "outcomes": [_outcome(outcome, texts) for outcome in merged.outcomes],
        "cases": cases,
        "signatures": _signatures(known_failures()),
        "device": DEVICE,
        "nowhere": NOWHERE,
        "texts": texts.texts,
    }


def _column(environment: Environment) -> Column:
    version = re.sub(r"^torch (\S+), .*|.*", r"\1", environment.name, flags=re.DOTALL)
    device = environment.device if environment.world_size else NOWHERE
    more = environment.name.removeprefix(f"torch {version}, {device}").strip(", ")
    return Column(
        name=environment.name,
        torch=version or "?",
        more=more,
        device=device,
        anchor=re.sub(r"[^\w.]+", "-", environment.name).strip("-"),
        options=environment.rerun_options,
        packages=", ".join(f"{name} {package}" for name, package in _versions(environment).items()),
        incomplete=environment.ended if not environment.complete else "",
    )


def _versions(environment: Environment) -> dict[str, str]:
    return {**environment.packages, "Python": environment.python or "unknown"}


def _is_used(merged: MergedReport, axis: str, value: str) -> bool:
    return any(getattr(case, axis) == value for case in merged.cases)


def _case(case: MergedCase, words: dict[str, _Numbers], paths: _Numbers, texts: _Numbers) -> list[Any]:
    begin = "".join(f"{word}/" for word in (case.strategy, case.offload, case.staging) if word)
    others = case.id.removeprefix(begin).removesuffix(case.path).strip("/")
    return [
        *(words[axis].number_of(getattr(case, axis)) for axis in _AXES),
        texts.number_of(others),
        _DIRECTIONS.index(case.direction),
        paths.number_of(case.path),
        [_NO_RESULT if index is None else index for index in case.outcomes],
        [texts.number_of(f"{statement.where}: {statement.text}") for statement in case.statements],
        int(any(statement.changes for statement in case.statements)),
    ]


def _outcome(outcome: Outcome, texts: _Numbers) -> list[Any]:
    raised = " ".join(outcome.message.removesuffix(SHORTENED).split())
    message = "" if raised in " ".join(outcome.reason.split()) else outcome.message
    also = "\n".join(outcome.also)
    return [_KINDS.index(outcome.kind), *map(texts.number_of, (outcome.reason, message, also, outcome.known))]


def _signatures(entries: Iterable[KnownFailure]) -> dict[str, list[str]]:
    """By entry; with ``<device>`` for any device's name, as the catalogue's own files have it."""
    return {
        entry.id: [pattern.pattern.replace(DEVICE, "<device>") for pattern in entry.signatures]
        for entry in entries
        if entry.signatures
    }
