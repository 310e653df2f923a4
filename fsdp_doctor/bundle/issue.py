"""issue.md: what a maintainer needs, within what a GitHub issue takes, the answer to the first questions on top."""

from __future__ import annotations

import pathlib
import re
from collections import Counter
from collections.abc import Mapping

import jinja2

from fsdp_doctor.bundle.chosen_case import SCRIPT
from fsdp_doctor.bundle.issue_head import Head
from fsdp_doctor.bundle.private_kinds import PrivateKind

MOST_CHARACTERS = 65_536
# Characters of each part; together they leave room for the head and the words between.
_MOST: dict[str, int] = {
    "explain.txt": 9_000,
    "stacks.txt": 12_000,
    "log.txt": 12_000,
    "check.txt": 7_000,
    "command.txt": 1_500,
    "case.txt": 1_500,
    SCRIPT: 12_000,
    "environment.txt": 3_000,
}
# Each of them would make the fence longer by two.
_MANY_BACKTICKS = re.compile("`{17,}")
_LEFT_OUT = "[... the rest is in the bundle ...]"


def render(head: Head, files: Mapping[str, str], replaced: Counter[PrivateKind]) -> str:
    """The issue. head, files: with everything private replaced already. replaced: how often, by kind."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"fenced": _fenced, "code": _code}
    shown = {name: _cut(files[name], most) for name, most in _MOST.items() if name in files}
    text = environment.get_template("issue.md.jinja").render(
        head=head, shown=shown, files=sorted(files), replaced=replaced.most_common(), script=SCRIPT
    )
    return text[:MOST_CHARACTERS]


def _cut(text: str, most: int) -> str:
    """Its beginning and its end, by whole lines, where it is too long."""
    if len(text) <= most:
        return text.rstrip("\n")
    begin = text[: most // 2].rpartition("\n")[0]
    end = text[-(most // 2) :].partition("\n")[2]
    return f"{begin}\n{_LEFT_OUT}\n{end}".rstrip("\n")


def _fenced(text: str, language: str = "") -> str:
    """A block of code whose fence is longer than any run of backticks in it."""
    text = _MANY_BACKTICKS.sub("`" * 16, text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _code(text: str) -> str:
    """The same within a line."""
    text = _MANY_BACKTICKS.sub("`" * 16, text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"
