"""Signatures of known failures: regular expressions over a message on one line, with any device's name."""

from __future__ import annotations

import functools
import re

DEVICE = r"(?:cpu|cuda|npu|xpu|hpu|mps|mtia|musa|emulated|privateuseone)(?::\d+)?"
_QUOTES = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "`": "'"})
_NO_LITERAL = re.compile(r"\((?:\?[^)]*)?[^()]*\)[?*+]?|\[[^\]]*\][?*+]?|\\.[?*+]?|[^\\)\]][?*]|[().?*+^$|'\"]")


def join_lines(text: str) -> str:
    """``text`` with one space between words and straight quotes."""
    if not text.isascii() or "`" in text:
        text = text.translate(_QUOTES)
    return " ".join(text.split())


@functools.lru_cache(maxsize=256)
def list_readings(message: str) -> tuple[str, ...]:
    """A message on one line, and its first line if there are more: a signature may be in either."""
    whole, first = join_lines(message), join_lines(message.split("\n", 1)[0])
    return (whole,) if whole == first else (whole, first)


def compile_signature(text: str) -> re.Pattern[str]:
    """The signature of an entry's text, in which ``<device>`` is any device's name, with or without its index."""
    return re.compile(join_lines(text).replace("<device>", DEVICE))


@functools.cache
def find_anchor(pattern: re.Pattern[str]) -> str:
    """The longest literal piece of a signature, which is in whatever it matches; empty where case does not matter.

    It has no quotes, which a log may have in another form.
    """
    if "(?i)" in pattern.pattern:
        return ""
    return max(_NO_LITERAL.split(pattern.pattern.replace(DEVICE, "(device)")), key=len)
