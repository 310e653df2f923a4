"""Signatures of known failures: regular expressions over a message on one line, with any device's name."""

from __future__ import annotations

import functools
import re

DEVICE = r"(?:cpu|cuda|npu|xpu|hpu|mps|mtia|musa|emulated|privateuseone)(?::\d+)?"
_QUOTES = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "`": "'"})
_NO_LITERAL = re.compile(r"\((?:\?[^)]*)?[^()]*\)[?*+]?|\[[^\]]*\][?*+]?|\\.[?*+]?|[^\\)\]][?*]|[().?*+^$|'\"]")


def join_lines(text: str) -> str:
    """Joins a text into one line, with one space between words, and makes its quotes straight."""
    if not text.isascii() or "`" in text:
        text = text.translate(_QUOTES)
    return " ".join(text.split())


@functools.lru_cache(maxsize=256)
def list_readings(message: str) -> tuple[str, ...]:
    """Returns a message as one line and, if it has several lines, also its first line. A signature may match either."""
    whole, first = join_lines(message), join_lines(message.split("\n", 1)[0])
    return (whole,) if whole == first else (whole, first)


def compile_signature(text: str) -> re.Pattern[str]:
    """Compiles the signature of an entry. ``<device>`` matches any device's name, with or without its index."""
    return re.compile(join_lines(text).replace("<device>", DEVICE))


@functools.cache
def find_anchor(pattern: re.Pattern[str]) -> str:
    """Returns the longest literal piece of a signature, which every match contains; empty if the signature ignores
    case.

    The piece has no quotes, because a log may contain quotes of another form.
    """
    if "(?i)" in pattern.pattern:
        return ""
    return max(_NO_LITERAL.split(pattern.pattern.replace(DEVICE, "(device)")), key=len)
