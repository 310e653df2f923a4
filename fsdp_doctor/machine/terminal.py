"""Measures the width of the terminal, and wraps text to it."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

_NARROWEST = 40


def measure_width(most: int = 120) -> int:
    """Returns the terminal's width in columns, at most ``most``. A pipe has ``most`` columns, unless COLUMNS is set."""
    return min(shutil.get_terminal_size((most, 24)).columns, most)


def wrap(text: str, width: int) -> list[str]:
    """Wraps ``text``. A line that is too long is broken at blanks, and the rest is indented two columns more."""
    return [piece for line in text.splitlines() for piece in _wrap_line(line, max(width, _NARROWEST))]


def wrap_lines(lines: Iterable[str], width: int) -> list[str]:
    """Wraps each line. Empty lines are kept."""
    return [piece for line in lines for piece in wrap(line, width) or [""]]


def wrap_all(lines: Iterable[str], width: int) -> str:
    """Wraps each line as :func:`wrap_lines` does, and joins the lines to one text."""
    return "".join(f"{line}\n" for line in wrap_lines(lines, width))


def _wrap_line(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
