"""Small helpers that write text, used in the whole program: counts, sizes, shortened lists, first lines."""

from __future__ import annotations

import re
from collections.abc import Collection

# XML 1.0 cannot represent these characters, but a worker's exception or output can contain them.
_NOT_PRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def join_some(names: Collection[str], most: int = 5) -> str:
    """Joins the first ``most`` names with commas, and says how many more there are."""
    first = ", ".join(list(names)[:most])
    more = len(names) - most
    return f"{first} and {more} more" if more > 0 else first


def read_first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or the exception's type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def escape_controls(text: str) -> str:
    """Escapes every unprintable character, so that a name cannot control the terminal or end a line."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.4f} s"


def format_bytes(number: int | None) -> str:
    """Formats a size in a readable unit; returns a dash for None, which means that the size was not measured."""
    if number is None:
        return "-"
    size = float(number)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def find_main_thread(stack: str) -> list[str]:
    """Finds the main thread in the stacks of all threads, and returns its lines, innermost frame first.

    faulthandler labels the main thread as the current thread, unless a thread without a Python frame received the
    signal. In this case the main thread is the last thread of ``stack``.
    """
    *others, last = re.split(r"^(?=(?:Current thread|Thread) )", stack, flags=re.MULTILINE)
    return next((thread for thread in others if thread.startswith("Current")), last).strip().splitlines()


def make_printable(text: str) -> str:
    """Replaces each character that XML or most terminals cannot show, such as a lone surrogate, by a question mark."""
    return _NOT_PRINTABLE.sub("?", text)
