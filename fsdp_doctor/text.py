"""The parts of sentences and figures that every room borrows: counts, sizes, lists cut short, first lines."""

from __future__ import annotations

import re
from collections.abc import Collection

# XML 1.0 has no way to write these, and a worker's exception or output can contain them.
_NOT_PRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def join_some(names: Collection[str], most: int = 5) -> str:
    """The first names, joined by commas, and how many more there are."""
    first = ", ".join(list(names)[:most])
    more = len(names) - most
    return f"{first} and {more} more" if more > 0 else first


def read_first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the exception's type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def escape_controls(text: str) -> str:
    """The text with what a terminal obeys, or takes for the end of a line, as escapes: a name may have anything."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.4f} s"


def format_bytes(number: int | None) -> str:
    """A size in the unit that keeps it readable; a dash if it was not measured."""
    if number is None:
        return "-"
    size = float(number)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def find_main_thread(stack: str) -> list[str]:
    """The lines of the worker's main thread out of all threads' stacks, innermost frame first.

    faulthandler calls it the current one, unless the signal came to a thread that has no Python; it lists it last.
    """
    *others, last = re.split(r"^(?=(?:Current thread|Thread) )", stack, flags=re.MULTILINE)
    return next((thread for thread in others if thread.startswith("Current")), last).strip().splitlines()


def make_printable(text: str) -> str:
    """``text`` without the characters that XML and most terminals cannot show, lone surrogates among them."""
    return _NOT_PRINTABLE.sub("?", text)
