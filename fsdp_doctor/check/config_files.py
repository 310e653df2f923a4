"""Reads configuration files in YAML, JSON or TOML as settings, with the line of each setting.

Limits apply to the size, the nesting depth and the time to wait for a pipe. YAML aliases count at their expanded size.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from fsdp_doctor.check.settings import Setting
from fsdp_doctor.errors import UsageError
from fsdp_doctor.machine.waited_input import read_parts
from fsdp_doctor.text import read_first_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MAX_BYTES = 4 << 20
_MAX_LINES = 100_000
_MAX_SETTINGS = 20_000
_MAX_DEPTH = 32
_MAX_KEY = 200
_MAX_YAML_EVENTS = 60_000
_MAX_YAML_SIZE = 4 << 20
_MAX_TOML_ASSIGNMENTS = 100_000
_MAX_TOML_PARTS_SQUARED = 5_000_000

# libyaml, if PyYAML has it, is ten times as fast.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_KEY_OF_LINE = re.compile(r"\s*[{,]?\s*\"?([\w.-]+)\"?\s*[:=]")
_NOT_IN_TOML_KEY = re.compile(r"[^\w.\"' \t-]")


def read_text(argument: str) -> tuple[str, str]:
    """Returns the name and the text of a file, or of standard input for ``-``.

    Raises UsageError for a file that cannot be read, is no UTF-8 text, is empty, or is too large.
    """
    name = "standard input" if argument == "-" else argument
    try:
        data = _read_bytes(argument)
    except (OSError, ValueError, RuntimeError) as error:  # os.path raises RuntimeError for the home of an unknown user.
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        form = "CONFIG must be a file, - for standard input, or an override like a.b=value"
        raise UsageError(f"cannot read {name}: {reason}; {form}") from None
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{name} is larger than {_MAX_BYTES >> 20} MiB, too large for a training configuration")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not a text file in UTF-8") from None
    if "\0" in text:
        raise UsageError(f"{name} is not a text file in UTF-8")
    if not text.strip():
        raise UsageError(f"{name} is empty")
    if text.count("\n") > _MAX_LINES:
        raise UsageError(f"{name} has more than {_MAX_LINES:,} lines, too many for a training configuration")
    return name, text


def parse(text: str, name: str, script: Callable[[str, str], Iterator[Setting]]) -> list[Setting]:
    """Reads the settings in a text, in the format that the suffix of ``name`` gives.

    For any other suffix, ``script`` reads the text; if it finds nothing, all formats are tried. Raises UsageError for
    invalid or too many settings.
    """
    parser = _OF_SUFFIX.get(pathlib.Path(name).suffix.lower(), script)
    try:
        rows = list(itertools.islice(parser(text, name), _MAX_SETTINGS + 1))
        if not rows and parser is script:
            rows = _parse_any_format(text, name)
    except RecursionError:
        raise UsageError(f"cannot read {name}: it is nested too deeply") from None
    if len(rows) > _MAX_SETTINGS:
        raise UsageError(f"{name} has more than {_MAX_SETTINGS:,} settings")
    return rows


@functools.lru_cache(maxsize=10_000)
def parse_scalar(text: str) -> Any:
    """Parses the value of an override by YAML's rules, which are close to Hydra's."""
    if len(text) > _MAX_KEY and not text.lstrip().startswith(("[", "{")):
        return text
    try:
        _check_yaml_size(text, "")
        value = yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, UsageError):
        return text
    return text if isinstance(value, dict) else value


def parse_json(row: Setting) -> list[Setting]:
    """Reads the settings in a JSON text that is the value of a setting. Raises UsageError for invalid JSON."""
    try:
        return list(flatten(json.loads(str(row.value)), row.key, lambda _: row.where))
    except (ValueError, RecursionError):
        raise UsageError(f"{row}: this is not JSON") from None


def flatten(data: Any, name: str, where: Callable[[str], str]) -> Iterator[Setting]:
    """Yields the leaves of nested dicts as settings.

    ``where`` maps the last part of a leaf's key to the leaf's place. Raises UsageError for data that is no dict or is
    nested too deeply.
    """
    if not isinstance(data, dict):
        raise _refuse_non_mapping(name)
    stack = [("", iter(data.items()))]
    while stack:
        prefix, items = stack[-1]
        for key, value in items:
            if len(str(key)) > _MAX_KEY:
                raise UsageError(f"{name}: a name has more than {_MAX_KEY} characters")
            if isinstance(value, dict) and value:
                if len(stack) > _MAX_DEPTH:
                    raise UsageError(f"cannot read {name}: it is nested too deeply")
                stack.append((f"{prefix}{key}.", iter(value.items())))
                break
            yield Setting(f"{prefix}{key}", value, where(str(key)))
        else:
            stack.pop()


def _read_bytes(argument: str) -> bytes:
    """Reads the whole file; of a file above the size limit, reads only slightly more than the limit."""
    path = None if argument == "-" else pathlib.Path(os.path.expanduser(argument))
    data = b""
    for part in read_parts(path, size=1 << 16):
        data += part
        if len(data) > _MAX_BYTES:
            break
    return data


def _parse_any_format(text: str, name: str) -> list[Setting]:
    if text.lstrip().startswith("{"):
        return list(itertools.islice(_parse_json_file(text, name), _MAX_SETTINGS + 1))
    for parser in (_parse_toml, _parse_yaml):
        try:
            return list(itertools.islice(parser(text, name), _MAX_SETTINGS + 1))
        except UsageError:
            continue
    return []


def _parse_json_file(text: str, name: str) -> Iterator[Setting]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}:{error.lineno}: invalid JSON: {error.msg}") from None
    except ValueError as error:
        raise UsageError(f"{name}: invalid JSON: {error}") from None
    yield from flatten(data, name, _find_lines(text, name))


def _parse_toml(text: str, name: str) -> Iterator[Setting]:
    # The parser's time grows with the square of the number of parts in a dotted key.
    parts = sum(piece.count(".") ** 2 for line in text.splitlines() for piece in _NOT_IN_TOML_KEY.split(line))
    if text.count("=") > _MAX_TOML_ASSIGNMENTS or parts > _MAX_TOML_PARTS_SQUARED:
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
    yield from flatten(data, name, _find_lines(text, name))


def _find_lines(text: str, name: str) -> Callable[[str], str]:
    """Returns a function that finds the place of a key in JSON or TOML, whose parsers do not give line numbers.

    The place includes the line only if exactly one line has the key.
    """
    lines: dict[str, list[int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if match := _KEY_OF_LINE.match(line[: 2 * _MAX_KEY]):
            lines.setdefault(match[1], []).append(number)

    def name_key(key: str) -> str:
        numbers = lines.get(key, ())
        return f"{name}:{numbers[0]}" if len(numbers) == 1 else name

    return name_key


def _parse_yaml(text: str, name: str) -> Iterator[Setting]:
    """Reads the settings of every document that is a mapping.

    Raises UsageError for invalid YAML, and for a text without a mapping.
    """
    try:
        _check_yaml_size(text, name)
        loader = _LOADER(text)
        mappings = 0
        while loader.check_node():
            document = loader.get_node()
            if isinstance(document, yaml.MappingNode):
                mappings += 1
                yield from _flatten_yaml(loader, document, "", name)
        if not mappings:
            raise _refuse_non_mapping(name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UsageError(f"{name}{f':{mark.line + 1}' if mark else ''}: invalid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: invalid YAML: {read_first_line(error)}") from None
    except ValueError as error:
        raise UsageError(f"{name}: invalid YAML: {error}") from None


def _flatten_yaml(loader: Any, node: Any, prefix: str, name: str) -> Iterator[Setting]:
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
        if len(key) > _MAX_KEY:
            raise UsageError(f"{name}:{line}: a name has more than {_MAX_KEY} characters")
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _flatten_yaml(loader, value_node, f"{prefix}{key}.", name)
        else:
            yield Setting(f"{prefix}{key}", loader.construct_object(value_node, deep=True), f"{name}:{line}")


def _check_yaml_size(text: str, name: str) -> None:
    """Raises UsageError if the text is nested too deeply, contains itself, or is too large with its aliases
    expanded.
    """
    sizes: dict[str, tuple[int, int]] = {}
    # For each open collection: its anchor, and its size and depth so far. The outermost entry is the stream.
    stack: list[tuple[str | None, int, int]] = [(None, 0, 0)]
    for number, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        if number > _MAX_YAML_EVENTS:
            raise UsageError(f"{name} has more than {_MAX_YAML_EVENTS:,} names and values")
        match event:
            case yaml.AliasEvent():
                if any(anchor == event.anchor for anchor, _, _ in stack):
                    raise UsageError(f"{name}:{event.start_mark.line + 1}: invalid YAML: a value contains itself")
                size, depth = sizes.get(event.anchor, (1, 0))
            case yaml.ScalarEvent():
                size, depth = 1 + len(event.value), 0
                if event.anchor:
                    sizes[event.anchor] = size, depth
            case yaml.CollectionStartEvent():
                stack.append((event.anchor, 1, 0))
                if len(stack) > _MAX_DEPTH:
                    raise UsageError(f"cannot read {name}: it is nested too deeply")
                continue
            case yaml.CollectionEndEvent():
                anchor, size, depth = stack.pop()
                if anchor:
                    sizes[anchor] = size, depth
            case _:
                continue
        above, total, deepest = stack.pop()
        total, deepest = total + size, max(deepest, depth + 1)
        stack.append((above, total, deepest))
        if total > _MAX_YAML_SIZE or deepest > _MAX_DEPTH:
            raise UsageError(f"cannot read {name}: with its aliases written out it is too large")


def _refuse_non_mapping(name: str) -> UsageError:
    return UsageError(f"{name} does not contain settings: expected names with values, not a list or a single value")


_OF_SUFFIX: dict[str, Callable[[str, str], Iterator[Setting]]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".json": _parse_json_file,
    ".toml": _parse_toml,
}
