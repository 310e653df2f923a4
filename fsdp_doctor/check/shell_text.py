"""A shell's text, or one that has commands in it: its variables put in, its lines joined where they go on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdp_doctor.check.settings import Setting
from fsdp_doctor.check.yaml_text import scalar
from fsdp_doctor.errors import UsageError

_LONGEST_VALUE = 20_000
_MOST_EXPANDED = 4 << 20
_TRAILING = "\\,;.)"

# The number of repetitions bounds the memory of the search.
_VALUE = r"(?:'[^'\n]*'|\"[^\"\n]*\"|\$\{[^}\n]{0,500}\}|\$(?!\{)|[^\s'\"`$]){0,20000}"
_OVERRIDE = re.compile(
    r"(?<![\w.$/=:-])(?:--)?(?P<quote>['\"])?(?:\+{1,2})?(?P<key>[A-Za-z_]\w*(?:\.\w+){1,30})="
    rf"(?P<value>(?(quote)(?:(?!(?P=quote))[^\n]){{0,20000}}|{_VALUE}))"
)
_DELETION = re.compile(r"(?<!\S)['\"]?~(?P<key>[A-Za-z_]\w*(?:\.\w+){1,30})")
_ASSIGNMENT = re.compile(
    rf"^[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_]\w*)=(?!\()(?P<value>{_VALUE})[ \t]*(?:[#;].*)?$", re.MULTILINE
)
# `: "${NAME:=value}"`, which assigns where nothing is.
_DEFAULTED = re.compile(
    r"^[ \t]*:[ \t]+\"?\$\{(?P<name>[A-Za-z_]\w*):?=(?P<value>[^{}\n]*)\}\"?[ \t]*(?:#.*)?$", re.MULTILINE
)
_ARRAY = re.compile(r"^[ \t]*(?P<name>[A-Za-z_]\w*)=\((?P<value>[^()]{0,20000})\)[ \t]*$", re.MULTILINE)
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)(?:\[@\])?(?::?[-=](?P<default>[^{}]*))?\}|(?P<bare>[A-Za-z_]\w*))")
_QUOTED_ARRAY = re.compile(r"\"(\$\{\w+\[@\]\})\"")
_QUOTED = re.compile(r"'([^'\n]*)'|\"([^\"\n]*)\"")
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
# At a line's end; with a blank after it the shell would not go on, but people paste so.
_CONTINUED = re.compile(r"\\[ \t]*$")


@dataclass
class ShellText:
    """text: without its comments. name: for ``where``. variables: those that the text itself assigns, each to
    one value.

    Raises UsageError where variables that hold one another would become too long.
    """

    text: str
    name: str
    variables: dict[str, str] = field(default_factory=dict)
    _expanded: int = 0

    def __post_init__(self) -> None:
        self.text = _COMMENT.sub("", self.text)
        found: dict[str, set[str]] = {}
        for pattern in (_ARRAY, _DEFAULTED, _ASSIGNMENT):
            for match in pattern.finditer(self.text):
                value = match["value"] if pattern is _ARRAY else unquoted(match["value"])
                value = self.substituted(value.replace("\n", " "))
                found.setdefault(match["name"], set()).add(value)
                self.variables[match["name"]] = value
        # What branches of a script assign differently is not known.
        for name in (name for name, values in found.items() if len(values) > 1):
            del self.variables[name]

    def substituted(self, value: str) -> str:
        """``value`` with the variables put in that are known; what is not known stays as it is written."""

        def put(match: re.Match[str]) -> str:
            fallback = match["default"] if match["default"] is not None else match[0]
            found = self.variables.get(match["braced"] or match["bare"], fallback)
            self._expanded += len(found)
            if self._expanded > _MOST_EXPANDED:
                raise UsageError(f"{self.name}: its variables, which hold one another, become too long")
            return found

        found = _VARIABLE.sub(put, _QUOTED_ARRAY.sub(r"\1", value))
        if len(found) > max(_LONGEST_VALUE, len(value)):
            raise UsageError(f"{self.name}: its variables, which hold one another, become too long")
        return found

    def overrides(self) -> Iterator[Setting]:
        """Every ``a.b=value`` in the text, in its order, wherever it stands."""
        deleted = {match["key"] for match in _DELETION.finditer(self.text)}
        line, seen = 1, 0
        for match in _OVERRIDE.finditer(self.text):
            value = match["value"] if match["quote"] else unquoted(match["value"].rstrip(_TRAILING))
            line, seen = line + self.text.count("\n", seen, match.start()), match.start()
            if match["key"] not in deleted:
                where = f"{self.name}:{line}"
                yield Setting(match["key"], scalar(self.substituted(value)), where)

    def lines(self) -> Iterator[tuple[int, str]]:
        """The number of each line and its text, which goes on where a backslash says so; variables are not put in."""
        parts: list[str] = []
        first = 1
        for number, line in enumerate(self.text.split("\n"), 1):
            if not parts:
                first = number
            if _CONTINUED.search(line[-100:]):
                parts.append(line.rstrip()[:-1])
                continue
            yield first, "".join([*parts, line])
            parts = []
        if parts:
            yield first, "".join(parts)


def unquoted(text: str) -> str:
    return _QUOTED.sub(lambda match: match[1] if match[1] is not None else match[2], text)
