"""One flat view of a training configuration: dotted keys, their values, and where each was written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.errors import UsageError

_WHOLE_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([A-Za-z_][\w.]*)\s*(?:,\s*([^{}]*))?\}")
_TRUE = frozenset(("true", "yes", "on", "y", "t", "1"))
_FALSE = frozenset(("false", "no", "off", "n", "f", "0"))


class Unreadable(Exception):
    """A setting that decides something has a value which cannot be read; the message says which, for the user."""


@dataclass(frozen=True)
class Setting:
    """One leaf: ``where`` is ``file:line``, a file, or the command line."""

    key: str
    value: Any
    where: str

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key}={value} ({self.where})"


class Settings:
    """Settings by key, of which a later one replaces an earlier one. A value ``${a.b}`` stands for that of ``a.b``."""

    def __init__(self, rows: Iterable[Setting]) -> None:
        self._rows: dict[str, Setting] = {}
        self._prefixes: set[str] = set()
        for row in rows:
            self.put(row)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Setting]:
        return iter(self._rows.values())

    def below(self, prefix: str) -> list[Setting]:
        """The settings whose key begins with ``prefix`` and a dot."""
        return [row for row in self if row.key.startswith(f"{prefix}.")]

    def first(self, *keys: str) -> Setting | None:
        """The setting of the first of ``keys`` that is there and not null, with references followed."""
        for key in keys:
            row = self._rows.get(key)
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
            return int(str(row.value))
        except ValueError:
            raise Unreadable(f"{row} is not a whole number") from None

    def word(self, *keys: str, default: str = "") -> str:
        """A text. Raises Unreadable for a reference that leads nowhere."""
        row = self.first(*keys)
        if row is None:
            return default
        text = str(row.value)
        if "${" in text:
            raise Unreadable(f"{row} refers to a value that is not in the configuration")
        return text

    def put(self, row: Setting) -> None:
        """Adds a setting. A value replaces what was below its key, and what stood above it as one value."""
        above = [row.key[:at] for at, letter in enumerate(row.key) if letter == "."]
        for key in above:
            self._rows.pop(key, None)
        if row.key in self._prefixes:
            self.without(row.key)
        self._prefixes.update(above)
        self._rows[row.key] = row

    def without(self, key: str) -> None:
        """Removes a key, with all below it: Hydra's ``~key``."""
        for known in [known for known in self._rows if known == key or known.startswith(f"{key}.")]:
            del self._rows[known]

    def _followed(self, row: Setting) -> Setting:
        seen = {row.key}
        value = row.value
        while isinstance(value, str) and (match := _WHOLE_REFERENCE.fullmatch(value.strip())):
            key, default = match[1], match[2]
            if key in seen:
                raise UsageError(f"{row} refers to itself")
            seen.add(key)
            if key in self._rows:
                value = self._rows[key].value
            elif default is not None:
                value = None if default.strip() in ("null", "") else default.strip()
            else:
                break
        return Setting(row.key, value, row.where)
