"""The width of the terminal, and text that fits it."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

_NARROWEST = 40


def measure_width(most: int = 120) -> int:
    """The width in columns, at most ``most``, which is also that of a pipe; COLUMNS sets it."""
    return min(shutil.get_terminal_size((most, 24)).columns, most)


def wrap(text: str, width: int) -> list[str]:
    """Wraps ``text``: a line that is too long is broken at blanks, and its further lines are indented by two more."""
    return [piece for line in text.splitlines() for piece in _wrap_line(line, max(width, _NARROWEST))]


def wrap_lines(lines: Iterable[str], width: int) -> list[str]:
    """Wraps each line; an empty line stays."""
    return [piece for line in lines for piece in wrap(line, width) or [""]]


def wrap_all(lines: Iterable[str], width: int) -> str:
    """Wraps each line as :func:`wrap_lines`, and joins them to one text."""
    return "".join(f"{line}\n" for line in wrap_lines(lines, width))


def _wrap_line(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
