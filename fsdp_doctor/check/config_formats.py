"""YAML, JSON and TOML to settings, each with the line that it was written on."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from fsdp_doctor.check.settings import Setting
from fsdp_doctor.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KEY_OF_LINE = re.compile(r"\s*[{,]?\s*\"?([\w.-]+)\"?\s*[:=]")


def any_format(text: str, name: str, most: int) -> list[Setting]:
    """Whichever of the formats the text is in; ``most`` settings of it, and none where it is in none of them."""
    if text.lstrip().startswith("{"):
        return list(itertools.islice(_json(text, name), most))
    for parse in (_toml, _yaml):
        try:
            return list(itertools.islice(parse(text, name), most))
        except UsageError:
            continue
    return []


def scalar(text: str) -> Any:
    """The value of an override, by YAML's rules, which Hydra's come near to."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
    return text if isinstance(value, dict) else value


def _yaml(text: str, name: str) -> Iterator[Setting]:
    loader = yaml.SafeLoader
    try:
        document = yaml.compose(text, Loader=loader)
        if not isinstance(document, yaml.MappingNode):
            raise _not_a_mapping(name)
        yield from _leaves(loader(""), document, "", name, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UsageError(f"{name}{f':{mark.line + 1}' if mark else ''}: invalid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: invalid YAML: {str(error).splitlines()[0]}") from None
    except ValueError as error:
        raise UsageError(f"{name}: invalid YAML: {error}") from None


def _leaves(loader: Any, node: Any, prefix: str, name: str, above: tuple[int, ...]) -> Iterator[Setting]:
    if id(node) in above:
        raise UsageError(f"{name}:{node.start_mark.line + 1}: invalid YAML: a mapping contains itself")
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value if isinstance(key_node, yaml.ScalarNode) else '?'}"
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves(loader, value_node, f"{key}.", name, (*above, id(node)))
        else:
            value = loader.construct_object(value_node, deep=True)
            yield Setting(key, value, f"{name}:{key_node.start_mark.line + 1}")


def _json(text: str, name: str) -> Iterator[Setting]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}:{error.lineno}: invalid JSON: {error.msg}") from None
    except ValueError as error:
        raise UsageError(f"{name}: invalid JSON: {error}") from None
    yield from _flat(data, name, text)


def _toml(text: str, name: str) -> Iterator[Setting]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"\s*\(at line (\d+), column \d+\)", str(error))
        place = f"{name}:{line[1]}" if line else name
        problem = str(error).replace(line[0], "") if line else str(error)
        raise UsageError(f"{place}: invalid TOML: {problem}") from None
    except ValueError as error:
        raise UsageError(f"{name}: invalid TOML: {error}") from None
    yield from _flat(data, name, text)


def _flat(data: Any, name: str, text: str) -> Iterator[Setting]:
    if not isinstance(data, dict):
        raise _not_a_mapping(name)
    lines = _lines_of_keys(text)

    def leaves(prefix: str, value: Any) -> Iterator[Setting]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from leaves(f"{prefix}.{key}" if prefix else str(key), inner)
        elif prefix:
            found = lines.get(prefix.rpartition(".")[2], [])
            yield Setting(prefix, value, f"{name}:{found[0]}" if len(found) == 1 else name)

    yield from leaves("", data)


def _not_a_mapping(name: str) -> UsageError:
    return UsageError(f"{name} does not contain settings: expected names with values, not a list or a single value")


def _lines_of_keys(text: str) -> dict[str, list[int]]:
    """The lines that begin with each key: JSON and TOML parsers do not say them, and a key may have several."""
    found: dict[str, list[int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if match := _KEY_OF_LINE.match(line):
            found.setdefault(match[1], []).append(number)
    return found


OF_SUFFIX: dict[str, Callable[[str, str], Iterator[Setting]]] = {
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": _json,
    ".toml": _toml,
}
