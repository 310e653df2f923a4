"""One flat view of a training configuration: dotted keys, their values, and where each was written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fsdp_doctor.errors import UsageError

_WHOLE_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([A-Za-z_][\w.]*)\s*(?:,\s*([^{}]*))?\}")
_TRUE = frozenset(("true", "yes", "on", "y", "t", "1"))
_FALSE = frozenset(("false", "no", "off", "n", "f", "0"))
_LONGEST_SHOWN = 160
_LARGEST_NUMBER = 1_000_000_000


def _names(value: Any) -> list[Any] | None:
    """The devices of a list, or of a text such as ``0,1`` or ``0,``; None for what is neither."""
    if isinstance(value, list):
        return value
    parts = [part.strip() for part in str(value).split(",")]
    named = [part for part in parts if part]
    return named if len(parts) > 1 and all(map(str.isdecimal, named)) else None


class Unreadable(Exception):
    """A setting that decides something has a value which cannot be read; the message says which, for the user."""


class Expression(str):
    """The source of a value that only running the program would give, as in Python."""


@dataclass(frozen=True)
class Setting:
    """One leaf: ``where`` is ``file:line``, a file, or the command line."""

    key: str
    value: Any
    where: str

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else str(self.value)
        shown = value if len(value) <= _LONGEST_SHOWN else f"{value[:_LONGEST_SHOWN]}..."
        return f"{self.key}={shown} ({self.where})"

    @property
    def file(self) -> str:
        """``where`` without its line."""
        name, _, line = self.where.rpartition(":")
        return name if name and line.isdecimal() else self.where


@dataclass(frozen=True)
class Replaced:
    """Two values of one key in one file, of which the later counts."""

    earlier: Setting
    later: Setting


@dataclass
class Settings:
    """Settings by key, of which a later one replaces an earlier one. A value ``${a.b}`` stands for that of ``a.b``.

    replaced: the keys that one file sets twice, to different values.
    """

    rows: dict[str, Setting] = field(default_factory=dict)
    replaced: dict[str, Replaced] = field(default_factory=dict)
    # By each prefix of a key, the keys below it, in their order.
    _below: dict[str, dict[str, None]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Setting]) -> Settings:
        settings = cls()
        for row in rows:
            settings.put(row)
        return settings

    @classmethod
    def joined(cls, *parts: Settings | Iterable[Setting]) -> Settings:
        """Of several parts, of which a later one replaces an earlier one; what one file sets twice stays known."""
        found = cls.of(row for part in parts for row in part)
        for part in parts:
            twice = part.replaced.items() if isinstance(part, Settings) else ()
            found.replaced |= {key: one for key, one in twice if found.rows.get(key) == one.later}
        return found

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def __iter__(self) -> Iterator[Setting]:
        return iter(self.rows.values())

    def below(self, prefix: str) -> list[Setting]:
        """The settings whose key begins with ``prefix`` and a dot."""
        return [self.rows[key] for key in self._below.get(prefix, ())]

    def first(self, *keys: str) -> Setting | None:
        """The setting of the first of ``keys`` that is there and not null, with references followed."""
        for key in keys:
            row = self.rows.get(key)
            if row is not None and (found := self._followed(row)).value is not None:
                return found
        return None

    def flag(self, *keys: str, default: bool = False) -> bool:
        """A truth value, as frameworks write it. Raises Unreadable for any other value."""
        row = self.first(*keys)
        if row is None:
            return default
        word = str(row.value).strip().lower()
        if word not in _TRUE | _FALSE:
            raise Unreadable(f"{row} is neither true nor false")
        return word in _TRUE

    def number(self, *keys: str, default: int | None = None) -> int | None:
        """A whole number. Raises Unreadable for any other value."""
        row = self.first(*keys)
        if row is None:
            return default
        try:
            number = int(str(row.value))
        except ValueError:
            raise Unreadable(f"{row} is not a whole number") from None
        if abs(number) > _LARGEST_NUMBER:
            raise Unreadable(f"{row} is not a number of any use here")
        return number

    def count(self, *keys: str) -> int | None:
        """A whole number of devices, or how many are named, as ``[0, 1]`` or ``0,1``.

        None for -1, which is all there are, for any other word, and for a value that only running would give.
        """
        row = self.first(*keys)
        if row is None:
            return None
        named = _names(row.value)
        if named is not None:
            return len(named)
        text = str(row.value).strip()
        return self.number(row.key) if text != "-1" and text.removeprefix("-").isdecimal() else None

    def word(self, *keys: str, default: str = "") -> str:
        """A text. Raises Unreadable for a reference that leads nowhere, and for what only running would give."""
        row = self.first(*keys)
        if row is None:
            return default
        text = str(row.value)
        if "${" in text or isinstance(row.value, Expression):
            raise Unreadable(f"{row} refers to a value that is not in the configuration")
        return text

    def put(self, row: Setting) -> None:
        """Adds a setting. A value replaces what was below its key, and what stood above it as one value."""
        above = [row.key[:at] for at, letter in enumerate(row.key) if letter == "."]
        for key in above:
            self._drop(key)
        for key in list(self._below.get(row.key, ())):
            self._drop(key)
        earlier = self.rows.get(row.key)
        if earlier is not None and earlier.value != row.value and earlier.file == row.file:
            self.replaced[row.key] = Replaced(earlier, row)
        for key in above:
            self._below.setdefault(key, {})[row.key] = None
        self.rows[row.key] = row

    def without(self, key: str) -> None:
        """Removes a key, with all below it: Hydra's ``~key``."""
        for known in [key, *self._below.get(key, ())]:
            self._drop(known)

    def _drop(self, key: str) -> None:
        if self.rows.pop(key, None) is not None:
            for at, letter in enumerate(key):
                if letter == ".":
                    self._below[key[:at]].pop(key, None)

    def _followed(self, row: Setting) -> Setting:
        seen = {row.key}
        value = row.value
        while isinstance(value, str) and (match := _WHOLE_REFERENCE.fullmatch(value.strip())):
            key, default = match[1], match[2]
            if key in seen:
                raise UsageError(f"{row} refers to itself")
            seen.add(key)
            if key in self.rows:
                value = self.rows[key].value
            elif default is not None:
                value = None if default.strip() in ("null", "") else default.strip()
            else:
                break
        return Setting(row.key, value, row.where)
