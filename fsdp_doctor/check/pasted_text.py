"""A text that people paste, as a shell script or a bug report: the overrides in it, and its fenced blocks."""

from __future__ import annotations

import bisect
import itertools
import re

from fsdp_doctor.check.config_formats import scalar
from fsdp_doctor.check.settings import Setting

_MOST_BLOCKS = 20
_TRAILING = "\\,;.)"

_VALUE = r"(?:'[^'\n]*'|\"[^\"\n]*\"|\$\{[^}\n]{0,500}\}|\$(?!\{)|[^\s'\"`$])*"
_OVERRIDE = re.compile(
    r"(?<![\w.$/=:-])(?:--)?(?P<quote>['\"])?(?:\+{1,2})?(?P<key>[A-Za-z_]\w*(?:\.\w+){1,30})="
    rf"(?P<value>(?(quote)(?:(?!(?P=quote))[^\n])*|{_VALUE}))"
)
_DELETION = re.compile(r"(?<!\S)['\"]?~(?P<key>[A-Za-z_]\w*(?:\.\w+)+)")
_ASSIGNMENT = re.compile(
    rf"^[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_]\w*)=(?P<value>{_VALUE})[ \t]*(?:#.*)?$", re.MULTILINE
)
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)(?::-(?P<default>[^{}]*))?\}|(?P<bare>[A-Za-z_]\w*))")
_QUOTED = re.compile(r"'([^'\n]*)'|\"([^\"\n]*)\"")
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(?P<body>.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)


def overrides(text: str, name: str) -> list[Setting]:
    """Every override in a text, in its order; variables that the text itself assigns are put in."""
    text = _COMMENT.sub("", text)
    variables: dict[str, str] = {}
    for match in _ASSIGNMENT.finditer(text):
        variables[match["name"]] = _substituted(_unquoted(match["value"]), variables)
    deleted = {match["key"] for match in _DELETION.finditer(text)}
    starts = [match.end() for match in re.finditer("\n", text)]
    found = []
    for match in _OVERRIDE.finditer(text):
        value = match["value"] if match["quote"] else _unquoted(match["value"].rstrip(_TRAILING))
        line = bisect.bisect_right(starts, match.start()) + 1
        if match["key"] not in deleted:
            found.append(Setting(match["key"], scalar(_substituted(value, variables)), f"{name}:{line}"))
    return found


def fenced_blocks(text: str) -> list[str]:
    """Markdown's blocks between ```, each after as many empty lines as stood before it, so that it keeps its lines."""
    return [
        "\n" * text.count("\n", 0, match.start("body")) + match["body"]
        for match in itertools.islice(_FENCED.finditer(text), _MOST_BLOCKS)
    ]


def _substituted(value: str, variables: dict[str, str]) -> str:
    def put(match: re.Match[str]) -> str:
        fallback = match["default"] if match["default"] is not None else match[0]
        return variables.get(match["braced"] or match["bare"], fallback)

    return _VARIABLE.sub(put, value)


def _unquoted(text: str) -> str:
    return _QUOTED.sub(lambda match: match[1] if match[1] is not None else match[2], text)
