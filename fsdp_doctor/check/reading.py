"""CONFIG arguments to settings: files, pasted commands, and overrides of one setting.

A file is YAML, JSON or TOML by its suffix. Any other file, and ``-`` for the standard input, is a text with
overrides ``a.b.c=value`` anywhere in it, as in a shell script or a bug report, or one of the three formats without
its suffix. No interpolation, shell variable or Hydra default list is expanded beyond what the text itself says.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml

from fsdp_doctor.check.settings import Setting, Settings
from fsdp_doctor.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMMAND_LINE = "command line"
_MOST_BYTES = 4 << 20
_MOST_SETTINGS = 20_000
_MOST_BLOCKS = 20
_TRAILING = "\\,;.)"

_VALUE = r"(?:'[^'\n]*'|\"[^\"\n]*\"|\$\{[^}\n]{0,500}\}|\$(?!\{)|[^\s'\"`$])*"
_ARGUMENT = re.compile(r"(?P<sign>~|\+{1,2})?(?P<key>[A-Za-z_]\w*(?:\.\w+)*)(?:=(?P<value>.*))?", re.DOTALL)
_IN_TEXT = re.compile(
    r"(?<![\w.$/=:-])(?:--)?(?P<quote>['\"])?(?:\+{1,2})?(?P<key>[A-Za-z_]\w*(?:\.\w+){1,30})="
    rf"(?P<value>(?(quote)(?:(?!(?P=quote))[^\n])*|{_VALUE}))"
)
_DELETION = re.compile(r"(?<!\S)['\"]?~(?P<key>[A-Za-z_]\w*(?:\.\w+)+)")
_ASSIGNMENT = re.compile(
    rf"^[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_]\w*)=(?P<value>{_VALUE})[ \t]*(?:#.*)?$", re.MULTILINE
)
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)(?::-(?P<default>[^{}]*))?\}|(?P<bare>[A-Za-z_]\w*))")
_QUOTED = re.compile(r"'([^'\n]*)'|\"([^\"\n]*)\"")
_KEY_OF_LINE = re.compile(r"\s*[{,]?\s*\"?([\w.-]+)\"?\s*[:=]")
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(?P<body>.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)


def read(arguments: Sequence[str]) -> Settings:
    """The settings of all arguments together: a later file replaces an earlier one, overrides replace files.

    Raises UsageError for what cannot be read, with the file and, where it is known, the line.
    """
    texts = [argument for argument in arguments if not _is_override(argument)]
    settings = Settings(row for argument in texts for row in _rows(argument))
    overrides = [_ARGUMENT.fullmatch(argument) for argument in arguments if _is_override(argument)]
    found = Settings([*settings, *(_override(match) for match in overrides if match and match["sign"] != "~")])
    for match in overrides:
        if match and match["sign"] == "~":
            found.without(match["key"])
    if not list(found):
        names = ", ".join(arguments)
        raise UsageError(f"there is no setting in {names}: no YAML, JSON or TOML, and no override a.b=value")
    return found


def _is_override(argument: str) -> bool:
    match = _ARGUMENT.fullmatch(argument)
    if match is None or os.path.exists(argument):
        return False
    return match["value"] is not None or match["sign"] == "~"


def _override(match: re.Match[str]) -> Setting:
    return Setting(match["key"], _scalar(match["value"]), COMMAND_LINE)


def _rows(argument: str) -> list[Setting]:
    name, text = ("standard input", _decoded("standard input", _stdin())) if argument == "-" else _file(argument)
    parse = _FORMATS.get(pathlib.Path(name).suffix.lower(), _any_text)
    try:
        rows = list(itertools.islice(parse(text, name), _MOST_SETTINGS + 1))
    except RecursionError:
        raise UsageError(f"{name} cannot be read: it is nested too deep") from None
    if len(rows) > _MOST_SETTINGS:
        raise UsageError(f"{name} has more than {_MOST_SETTINGS:,} settings")
    return rows


def _stdin() -> bytes:
    return sys.stdin.buffer.read(_MOST_BYTES + 1)


def _file(name: str) -> tuple[str, str]:
    try:
        with open(pathlib.Path(name).expanduser(), "rb") as file:
            return name, _decoded(name, file.read(_MOST_BYTES + 1))
    except (OSError, ValueError) as error:
        said = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(f"cannot read {name}: {said}; CONFIG is a file, - or an override a.b=value") from None


def _decoded(name: str, data: bytes) -> str:
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{name} is larger than {_MOST_BYTES >> 20} MiB, so it is no training configuration")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not a text file in UTF-8") from None
    if "\0" in text:
        raise UsageError(f"{name} is not a text file in UTF-8")
    if not text.strip():
        raise UsageError(f"{name} is empty")
    return text


def _any_text(text: str, name: str) -> Iterator[Setting]:
    """A pasted command if there is an override in it; else fenced blocks of any format, or whichever the whole is."""
    if found := _pasted(text, name):
        return iter(found)
    blocks = [
        "\n" * text.count("\n", 0, match.start("body")) + match["body"]
        for match in itertools.islice(_FENCED.finditer(text), _MOST_BLOCKS)
    ]
    return (row for block in blocks or [text] for row in _any_format(block, name))


def _any_format(text: str, name: str) -> list[Setting]:
    if text.lstrip().startswith("{"):
        return list(_json(text, name))
    for parse in (_toml, _yaml):
        try:
            return list(itertools.islice(parse(text, name), _MOST_SETTINGS + 1))
        except UsageError:
            continue
    return []


def _pasted(text: str, name: str) -> list[Setting]:
    """Every override in a text, in its order; variables that the text itself assigns are put in."""
    text = _COMMENT.sub("", text)
    variables: dict[str, str] = {}
    for match in _ASSIGNMENT.finditer(text):
        variables[match["name"]] = _substituted(_unquoted(match["value"]), variables)
    deleted = {match["key"] for match in _DELETION.finditer(text)}
    starts = [match.end() for match in re.finditer("\n", text)]
    found = []
    for match in _IN_TEXT.finditer(text):
        value = match["value"] if match["quote"] else _unquoted(match["value"].rstrip(_TRAILING))
        value = _scalar(_substituted(value, variables))
        line = bisect.bisect_right(starts, match.start()) + 1
        if match["key"] not in deleted:
            found.append(Setting(match["key"], value, f"{name}:{line}"))
    return found


def _substituted(value: str, variables: dict[str, str]) -> str:
    def put(match: re.Match[str]) -> str:
        fallback = match["default"] if match["default"] is not None else match[0]
        return variables.get(match["braced"] or match["bare"], fallback)

    return _VARIABLE.sub(put, value)


def _unquoted(text: str) -> str:
    return _QUOTED.sub(lambda match: match[1] if match[1] is not None else match[2], text)


def _scalar(text: str) -> Any:
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
            raise UsageError(f"{name} is no mapping of settings")
        yield from _leaves(loader(""), document, "", name, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UsageError(f"{name}{f':{mark.line + 1}' if mark else ''}: broken YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: broken YAML: {str(error).splitlines()[0]}") from None
    except ValueError as error:
        raise UsageError(f"{name}: broken YAML: {error}") from None


def _leaves(loader: Any, node: Any, prefix: str, name: str, above: tuple[int, ...]) -> Iterator[Setting]:
    if id(node) in above:
        raise UsageError(f"{name}:{node.start_mark.line + 1}: broken YAML: a mapping contains itself")
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
        raise UsageError(f"{name}:{error.lineno}: broken JSON: {error.msg}") from None
    except ValueError as error:
        raise UsageError(f"{name}: broken JSON: {error}") from None
    yield from _flat(data, name, text)


def _toml(text: str, name: str) -> Iterator[Setting]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"\s*\(at line (\d+), column \d+\)", str(error))
        place = f"{name}:{line[1]}" if line else name
        problem = str(error).replace(line[0], "") if line else str(error)
        raise UsageError(f"{place}: broken TOML: {problem}") from None
    except ValueError as error:
        raise UsageError(f"{name}: broken TOML: {error}") from None
    yield from _flat(data, name, text)


def _flat(data: Any, name: str, text: str) -> Iterator[Setting]:
    if not isinstance(data, dict):
        raise UsageError(f"{name} is no mapping of settings")
    lines = _lines_of_keys(text)

    def leaves(prefix: str, value: Any) -> Iterator[Setting]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from leaves(f"{prefix}.{key}" if prefix else str(key), inner)
        elif prefix:
            found = lines.get(prefix.rpartition(".")[2], [])
            yield Setting(prefix, value, f"{name}:{found[0]}" if len(found) == 1 else name)

    yield from leaves("", data)


def _lines_of_keys(text: str) -> dict[str, list[int]]:
    """The lines that begin with each key: JSON and TOML parsers do not say them, and a key may have several."""
    found: dict[str, list[int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if match := _KEY_OF_LINE.match(line):
            found.setdefault(match[1], []).append(number)
    return found


_FORMATS: dict[str, Callable[[str, str], Iterator[Setting]]] = {
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": _json,
    ".toml": _toml,
}
