"""A traceback's frames, as Python, IPython and rich write them; each becomes a line as Python writes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_LONGEST = 400
_PYTHON = re.compile(r'\s{0,400}File "[^"\n]{1,1000}", line \d{1,9}')
_IPYTHON = re.compile(r"\s{0,40}File (?P<file>[^\s\"]{1,400}):(?P<line>\d{1,9}), in (?P<function>[\w.<>]{1,200})\(")
# In rich's box: a path that was broken at the box's width, and lines of source, which have a number of their own.
_RICH = re.compile(r"(?P<file>\S.{0,600}?):(?P<line>\d{1,9}) in (?P<function>\S.{0,200})")
_RICH_SOURCE = re.compile(r"\s{0,20}(?:❱\s{0,20})?\d{1,9} [│|]|[│╭╰]")
_RICH_BEGIN = re.compile(r"\S.{0,600}?\.pyx?:\d{1,9}(?: in\b|$)")
BOX = "│╭╰┃"
_FILE = re.compile(r'File "(?P<file>[^"]+)"')
_RAISES = re.compile(r"raise\s+\S|assert\b")
# Of torch, as it is installed or lies there as source, of Python itself, and of no file at all.
_TORCH_OR_PYTHON = re.compile(
    r"(?:^|/)(?:torch|fsdp_doctor)/|^<|(?:^|/)(?:lib(?:64)?/python\d[\d.]*|python[\d.]+/lib)/"
)
_PACKAGE = re.compile(r"(?:^|/)(?:site|dist)-packages/(?!torch/)")
_LITERAL = re.compile(r"""["']([^"'\n]{1,400})""")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
# So many characters in a row are no accident.
_WORDS = 16


def frame_in(text: str) -> str | None:
    """The frame that the line is, or None."""
    if _PYTHON.match(text):
        return text.strip()[:_LONGEST]
    if match := _IPYTHON.match(text):
        return _as_python(match)
    return None


def raising_file(innermost: str, source: str, message: str) -> str:
    """The file of a traceback's innermost frame, where that frame's own line raised the message, and it is not torch's.

    Empty elsewhere: what a line calls may raise without a frame, as C++ does. A package passes on what torch raised,
    so its line must have the words of the message. source: that line.
    """
    if not _RAISES.match(source) or (match := _FILE.match(innermost)) is None:
        return ""
    file = match["file"].replace("\\", "/").lower()
    if _PACKAGE.search(file):
        return match["file"] if _has_words_of(source, message) else ""
    return "" if _TORCH_OR_PYTHON.search(file) else match["file"]


def _has_words_of(source: str, message: str) -> bool:
    pieces = (piece for literal in _LITERAL.findall(source) for piece in _PLACEHOLDER.split(literal))
    return any(len(piece) >= _WORDS and piece in message for piece in pieces)


def is_boxed(text: str) -> bool:
    return text.lstrip()[:1] in BOX if text else False


def begins_box(text: str) -> bool:
    """Whether a line in a box is of a traceback: its marker, or a frame."""
    inside = inner(text)
    return "❱" in inside or _RICH_BEGIN.match(inside) is not None


def inner(text: str) -> str:
    """What stands between the sides of the box, the indentation kept."""
    text = text.strip().removeprefix("│").removeprefix("┃").removeprefix(" ")
    return text.removesuffix("│").removesuffix("┃").rstrip()


def frames_in_box(lines: Iterable[str]) -> Iterator[str]:
    """Of the inner lines of one box."""
    joined = ""
    for line in (*lines, ""):
        if line and not _RICH_SOURCE.match(line) and len(joined) < _LONGEST:
            # What was broken at a space has lost it.
            joined += f" {line}" if line.startswith("in ") or joined.endswith(" in") else line
            continue
        if match := _RICH.match(joined):
            yield _as_python(match)
        joined = ""


def _as_python(match: re.Match[str]) -> str:
    return f'File "{match["file"]}", line {match["line"]}, in {match["function"]}'[:_LONGEST]
