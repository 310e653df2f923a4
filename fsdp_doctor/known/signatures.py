"""How a signature is written: a regular expression over a message on one line, with any device's name."""

from __future__ import annotations

import re

DEVICE = r"(?:cpu|cuda|npu|xpu|hpu|mps|mtia|musa|emulated|privateuseone)(?::\d+)?"
_QUOTES = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "`": "'"})


def one_line(text: str) -> str:
    """``text`` with one space between words and straight quotes."""
    return " ".join(text.translate(_QUOTES).split())


def compiled(text: str) -> re.Pattern[str]:
    """The signature of an entry's text, in which ``<device>`` is any device's name, with or without its index."""
    return re.compile(one_line(text).replace("<device>", DEVICE))
