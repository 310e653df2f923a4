"""Keeps error lines without the form of an exception, and warnings of torch's sharding, to quote them."""

from __future__ import annotations

import re
from typing import NamedTuple

from fsdp_doctor.explain.log_input import LogPiece, parse_line
from fsdp_doctor.explain.places import shorten
from fsdp_doctor.explain.rank_lines import has_any

_HINTS = ("rror", "RROR", "ailed to", "ould not", "nable to", "FATAL", "atal", "CRITICAL", "Warning")
# At the beginning of a message; a level also within a line.
_ERROR = re.compile(
    r"(?:^\W{0,4}|[:\])|>] )(?:(?:ERROR|Error|error|FATAL|[Ff]atal)(?::| (?:in|while|during|when|at|creating)\b)"
    r"|(?:Failed to|Could not|Unable to) \w)|(?:^|[\s\[|(])(?:ERROR|FATAL|CRITICAL)\b|\bNCCL error\b"
)
# Lines of a lower level, frames, code, and exceptions.
_OTHER = re.compile(
    r"(?:^|[\s\[(|])(?:DEBUG|INFO|WARNING)\b|\bFile \"|Traceback|^\s{4}|\b(?:raise|assert|print|if)\b"
    r"|\w(?:Error|Exception):"
)
_WARNING = re.compile(
    r"torch/distributed/(?:fsdp|_composable|tensor|checkpoint)/\S*\.py:\d+: (?P<text>\w*Warning: .*)", re.DOTALL
)
_MOST = 64


class NotedLine(NamedTuple):
    """A line of the log, with its file and number."""

    file: str
    number: int
    text: str

    @property
    def quoted(self) -> str:
        return f'({self.file}, line {self.number}): "{shorten(self.text)}"'


class NotedLines:
    """The error lines and the first warning of all files. Call ``read`` with each piece of a file in order."""

    def __init__(self) -> None:
        self._errors: list[NotedLine] = []
        self.warning: NotedLine | None = None

    def read(self, file: str, piece: LogPiece) -> None:
        if not has_any(_HINTS, piece.text):
            return
        for number, raw in zip(piece.numbers, piece.lines, strict=True):
            if not has_any(_HINTS, raw):
                continue
            if self.warning is None and (match := _WARNING.search(raw)):
                self.warning = NotedLine(file, number, match["text"])
            text = parse_line(number, raw).text
            if _ERROR.search(text) and not _OTHER.search(text) and not text.rstrip().endswith(":"):
                self._errors.append(NotedLine(file, number, text.strip()))
                # Of many lines, the first and the last ones are kept.
                del self._errors[_MOST // 2 : -_MOST // 2]

    def find_error(self, file: str = "", before: int = 0) -> NotedLine | None:
        """Returns the last error line above the given line of a file; without a file, the first error line.

        Returns None if there is no such line.
        """
        if not file:
            return next(iter(self._errors), None)
        above = (line for line in reversed(self._errors) if line.file == file and line.number < before)
        return next(above, None)
