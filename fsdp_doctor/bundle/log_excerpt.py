"""The part of a log that matters: its beginning, what stands around the failure, and its end."""

from __future__ import annotations

import pathlib
from collections import deque
from collections.abc import Iterable, Sequence

from fsdp_doctor.explain import Explanation
from fsdp_doctor.explain.exceptions import Raised
from fsdp_doctor.explain.log_input import LogInput

_BEGIN_LINES = 40
_BEFORE, _AFTER = 120, 120
_END_LINES = 80
_SHOWN_OTHERS = 3
_LINE_CHARACTERS = 4_000


def as_file(path: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """The log as a file that can be read twice: a copy in ``directory`` of what is none, like a pipe or ``-``.

    Raises UsageError for what cannot be read.
    """
    if path.is_file() or not (path.exists() or str(path) == "-"):
        return path
    copy = directory / f"log-{len(list(directory.iterdir())) + 1}.txt"
    with open(copy, "w", encoding="utf-8", errors="replace") as file:
        for _, lines in LogInput(None if str(path) == "-" else path).chunks():
            file.writelines(f"{line}\n" for line in lines)
    return copy


def excerpt(path: pathlib.Path, found: Explanation) -> str:
    """Whole lines of the log at ``path``, with what is left out between them counted. found: what explains the log."""
    places = _places(found, LogInput(path).name)
    windows = [(1, _BEGIN_LINES), *((max(1, line - _BEFORE), line + _AFTER) for line in places)]
    kept: dict[int, str] = {}
    end: deque[tuple[int, str]] = deque(maxlen=_END_LINES)
    number = 0
    for _, lines in LogInput(path).chunks():
        for number, line in enumerate(lines, start=number + 1):  # noqa: B020, the number goes on over the chunks
            end.append((number, line))
            if any(first <= number <= last for first, last in windows):
                kept[number] = line
    return "\n".join(_joined(kept | dict(end), number)) + "\n"


def _places(found: Explanation, name: str) -> list[int]:
    """The lines of that file where the cause stands, and the first exceptions beside it."""
    raised: Iterable[Raised] = (*([found.cause.first] if found.cause else []), *found.others[:_SHOWN_OTHERS])
    return [one.line for one in raised if one.file == name]


def _joined(kept: dict[int, str], last: int) -> Sequence[str]:
    lines: list[str] = []
    before = 0
    for number in [*sorted(kept), last + 1]:
        if number > before + 1:
            lines.append(f"[... {number - before - 1} lines left out ...]")
        if number in kept:
            lines.append(kept[number][:_LINE_CHARACTERS])
        before = number
    return lines
