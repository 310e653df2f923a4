"""YAML, JSON and TOML to settings, each with the line that it was written on."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fsdp_doctor.check.settings import Setting
from fsdp_doctor.check.yaml_text import not_a_mapping, settings_of_yaml
from fsdp_doctor.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KEY_OF_LINE = re.compile(r"\s*[{,]?\s*\"?([\w.-]+)\"?\s*[:=]")
# What a dotted key of TOML can be made of.
_NOT_IN_A_KEY = re.compile(r"[^\w.\"' \t-]")
_MOST_NESTED = 32
_LONGEST_KEY = 200
_MOST_ASSIGNMENTS = 100_000
_MOST_PARTS_SQUARED = 5_000_000


def any_format(text: str, name: str, most: int) -> list[Setting]:
    """Whichever of the formats the text is in; ``most`` settings of it, and none where it is in none of them."""
    if text.lstrip().startswith("{"):
        return list(itertools.islice(_json(text, name), most))
    for parse in (_toml, settings_of_yaml):
        try:
            return list(itertools.islice(parse(text, name), most))
        except UsageError:
            continue
    return []


def flattened(data: Any, name: str, where: Callable[[str], str]) -> Iterator[Setting]:
    """The leaves of nested dictionaries. where: of a leaf, by the last part of its key. Raises UsageError."""
    if not isinstance(data, dict):
        raise not_a_mapping(name)
    open_ = [("", 0, iter(data.items()))]
    while open_:
        prefix, depth, items = open_[-1]
        for key, value in items:
            if len(str(key)) > _LONGEST_KEY:
                raise UsageError(f"{name}: a name has more than {_LONGEST_KEY} characters")
            if isinstance(value, dict) and value:
                if depth == _MOST_NESTED:
                    raise UsageError(f"cannot read {name}: it is nested too deeply")
                open_.append((f"{prefix}{key}.", depth + 1, iter(value.items())))
                break
            yield Setting(f"{prefix}{key}", value, where(str(key)))
        else:
            open_.pop()


def _json(text: str, name: str) -> Iterator[Setting]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}:{error.lineno}: invalid JSON: {error.msg}") from None
    except ValueError as error:
        raise UsageError(f"{name}: invalid JSON: {error}") from None
    yield from flattened(data, name, _line_of_key(text, name))


def _toml(text: str, name: str) -> Iterator[Setting]:
    # The parser's time grows with the square of a dotted key's parts.
    parts = sum(piece.count(".") ** 2 for line in text.splitlines() for piece in _NOT_IN_A_KEY.split(line))
    if text.count("=") > _MOST_ASSIGNMENTS or parts > _MOST_PARTS_SQUARED:
        raise UsageError(f"cannot read {name}: it has too many settings, or is nested too deeply")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"\s*\(at line (\d+), column \d+\)", str(error))
        place = f"{name}:{line[1]}" if line else name
        problem = str(error).replace(line[0], "") if line else str(error)
        raise UsageError(f"{place}: invalid TOML: {problem}") from None
    except ValueError as error:
        raise UsageError(f"{name}: invalid TOML: {error}") from None
    yield from flattened(data, name, _line_of_key(text, name))


def _line_of_key(text: str, name: str) -> Callable[[str], str]:
    """Where a key stands: JSON and TOML parsers do not say it, and of several lines with one key none is said."""
    lines: dict[str, list[int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if match := _KEY_OF_LINE.match(line[: 2 * _LONGEST_KEY]):
            lines.setdefault(match[1], []).append(number)

    def where(key: str) -> str:
        found = lines.get(key, ())
        return f"{name}:{found[0]}" if len(found) == 1 else name

    return where


OF_SUFFIX: dict[str, Callable[[str, str], Iterator[Setting]]] = {
    ".yaml": settings_of_yaml,
    ".yml": settings_of_yaml,
    ".json": _json,
    ".toml": _toml,
}
