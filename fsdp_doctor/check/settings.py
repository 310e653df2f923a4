"""Settings of a training configuration: dotted keys, their values, and where each value was written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fsdp_doctor.errors import UsageError

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([A-Za-z_][\w.]*)\s*(?:,\s*([^{}]*))?\}")
_TRUE = frozenset(("true", "yes", "on", "y", "t", "1"))
_FALSE = frozenset(("false", "no", "off", "n", "f", "0"))
_LONGEST_SHOWN = 160
_LARGEST_NUMBER = 1_000_000_000


class Unreadable(Exception):
    """Error for a decisive setting whose value cannot be read. The message names the setting for the user."""


@dataclass(frozen=True)
class Setting:
    """One leaf of a configuration. ``where`` is ``file:line``, a file name, or the command line."""

    key: str
    value: Any
    where: str

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else str(self.value)
        shown = value if len(value) <= _LONGEST_SHOWN else f"{value[:_LONGEST_SHOWN]}..."
        return f"{self.key}={shown} ({self.where})"

    @property
    def name(self) -> str:
        """Last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def file(self) -> str:
        """File part of ``where``, without the line."""
        name, _, line = self.where.rpartition(":")
        return name if name and line.isdecimal() else self.where


@dataclass
class Settings:
    """Settings by key; later settings replace earlier ones. A value ``${a.b}`` refers to the value of ``a.b``.

    ``replaced`` maps a key to its earlier and its later setting, if one file sets the key to two different values.
    """

    rows: dict[str, Setting] = field(default_factory=dict)
    replaced: dict[str, tuple[Setting, Setting]] = field(default_factory=dict)
    # For each prefix of a key, the keys below it in order.
    _below: dict[str, dict[str, None]] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: Iterable[Setting]) -> Settings:
        settings = cls()
        for row in rows:
            settings.put(row)
        return settings

    @classmethod
    def join(cls, *parts: Settings | Iterable[Setting]) -> Settings:
        """Joins several parts. Later parts replace earlier ones, and ``replaced`` is kept."""
        settings = cls.from_rows(row for part in parts for row in part)
        for part in parts:
            if isinstance(part, Settings):
                for key, pair in part.replaced.items():
                    if settings.rows.get(key) == pair[1]:
                        settings.replaced[key] = pair
        return settings

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def __iter__(self) -> Iterator[Setting]:
        return iter(self.rows.values())

    def list_below(self, prefix: str) -> list[Setting]:
        """Lists the settings whose key begins with ``prefix`` and a dot."""
        return [self.rows[key] for key in self._below.get(prefix, ())]

    def find_first(self, *keys: str) -> Setting | None:
        """Finds the first of ``keys`` that is set and not null, and follows references; None if there is none."""
        for key in keys:
            if key in self.rows and (row := self._follow(self.rows[key])).value is not None:
                return row
        return None

    def read_text(self, *keys: str) -> str:
        """Reads the first of ``keys`` that is set, as text; empty if none is set."""
        row = self.find_first(*keys)
        return "" if row is None else str(row.value)

    def read_flag(self, *keys: str, default: bool = False) -> bool:
        """Reads a truth value, in any spelling that a framework accepts; returns ``default`` if no key is set.

        Raises Unreadable for any other value.
        """
        row = self.find_first(*keys)
        if row is None:
            return default
        word = str(row.value).strip().lower()
        if word not in _TRUE | _FALSE:
            raise Unreadable(f"{row} must be true or false")
        return word in _TRUE

    def find_first_true(self, *keys: str) -> Setting | None:
        """Returns the setting of the first of ``keys`` that is set; None if its value is not true.

        Raises Unreadable like ``read_flag``.
        """
        return self.find_first(*keys) if self.read_flag(*keys) else None

    def read_number(self, *keys: str, default: int | None = None) -> int | None:
        """Reads a whole number; returns ``default`` if no key is set. Raises Unreadable for any other value."""
        row = self.find_first(*keys)
        if row is None:
            return default
        try:
            number = int(str(row.value))
        except ValueError:
            raise Unreadable(f"{row} is not a whole number") from None
        if abs(number) > _LARGEST_NUMBER:
            raise Unreadable(f"{row} is larger than any number that is meaningful here")
        return number

    def count(self, *keys: str) -> int | None:
        """Reads a number of devices, or counts the devices in a list such as ``[0, 1]`` or ``0,1``.

        Returns None if no key is set, for -1 (all devices), and for a word such as ``auto``.
        """
        row = self.find_first(*keys)
        if row is None:
            return None
        if isinstance(row.value, list):
            return len(row.value)
        text = str(row.value).strip()
        names = [name.strip() for name in text.split(",") if name.strip()]
        if "," in text and names and all(map(str.isdecimal, names)):
            return len(names)
        return self.read_number(row.key) if text != "-1" and text.removeprefix("-").isdecimal() else None

    def read_word(self, *keys: str, default: str = "") -> str:
        """Reads a word. Raises Unreadable if the word refers to a value outside the configuration."""
        row = self.find_first(*keys)
        if row is None:
            return default
        if "${" in str(row.value):
            raise Unreadable(f"{row} refers to a value that is not in the configuration")
        return str(row.value)

    def put(self, row: Setting) -> None:
        """Adds a setting, which replaces the settings below its key but not the settings above its key.

        Hydra's ``engine=megatron engine.dtype=bfloat16`` first chooses a group and then changes a value in it.
        """
        above = [row.key[:at] for at, letter in enumerate(row.key) if letter == "."]
        for key in [*self._below.get(row.key, ())]:
            self._drop(key)
        earlier = self.rows.get(row.key)
        if earlier is not None and earlier.value != row.value and earlier.file == row.file:
            self.replaced[row.key] = (earlier, row)
        for key in above:
            self._below.setdefault(key, {})[row.key] = None
        self.rows[row.key] = row

    def remove(self, key: str) -> None:
        """Removes a key and all settings below it, as Hydra's ``~key`` does."""
        for name in [key, *self._below.get(key, ())]:
            self._drop(name)

    def _drop(self, key: str) -> None:
        if self.rows.pop(key, None) is not None:
            for at, letter in enumerate(key):
                if letter == ".":
                    self._below[key[:at]].pop(key, None)

    def _follow(self, row: Setting) -> Setting:
        seen = {row.key}
        value = row.value
        while isinstance(value, str) and (match := _REFERENCE.fullmatch(value.strip())):
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
