"""Reads the entries of the catalogue from ``entries/*.toml``, a file for each group."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

from packaging.specifiers import SpecifierSet

from fsdp_doctor.known.clues import CLUES, ClueName
from fsdp_doctor.known.failures import KnownFailure, Trigger
from fsdp_doctor.known.run_context import DeviceKind
from fsdp_doctor.known.signatures import compiled

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DIRECTORY = pathlib.Path(__file__).with_name("entries")


def entries() -> Iterator[KnownFailure]:
    """All of them, group after group. Raises TypeError for a key that an entry does not have."""
    for file in sorted(DIRECTORY.glob("*.toml")):
        for fields in tomllib.loads(file.read_text(encoding="utf-8"))["failure"]:
            yield _entry(file.stem.partition("_")[2], fields)


def _entry(group: str, fields: dict[str, Any]) -> KnownFailure:
    """One table of the file: every key of it is a field, and each is read as what it holds."""
    return KnownFailure(group=group, **{name: _READ.get(name, str)(value) for name, value in fields.items()})


def _prose(text: str) -> str:
    return " ".join(text.split())


def _trigger(row: dict[str, str | list[str]]) -> Trigger:
    """A row's facts about the run, each read as what it holds; every other key is an axis."""
    facts = {name: read(row[name]) for name, read in _FACTS.items() if name in row}
    return Trigger({axis: _tuple(allowed) for axis, allowed in row.items() if axis not in _FACTS}, **facts)


def _devices(value: str | list[str]) -> tuple[str, ...]:
    return get_args(DeviceKind) if value == "*" else _tuple(value)


def _tuple(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _patterns(texts: list[str]) -> tuple[re.Pattern[str], ...]:
    return tuple(map(compiled, texts))


def _needs(names: list[str]) -> tuple[ClueName, ...]:
    known: dict[str, ClueName] = {name: name for name in CLUES}
    return tuple(known[name] for name in names)


_FACTS: dict[str, Callable[[Any], Any]] = {
    "device": _devices,
    "ranks": SpecifierSet,
    "shard_group": SpecifierSet,
    "shards": _tuple,
    "direction": _tuple,
}
_READ: dict[str, Callable[[Any], Any]] = {
    "signatures": _patterns,
    "symptoms": _patterns,
    "frames": _patterns,
    "unless": _patterns,
    "needs": _needs,
    "triggers": lambda rows: tuple(map(_trigger, rows)),
    "race": bool,
    "frameworks": tuple,
    "measured": tuple,
    "references": tuple,
    "cause": _prose,
    "remedy": _prose,
    "check": _prose,
}
