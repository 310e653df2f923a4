"""The exceptions in a log: tracebacks taken out of interleaved ranks, and those that lost their form on the way."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdp_doctor.catalogue import known_failures
from fsdp_doctor.explain.lines import Line, parsed, time_of

_BEGIN = "Traceback (most recent call last)"
# Ray says so before it repeats the traceback of a remote task.
_RAY_BEGIN = re.compile(r"RayTaskError(?:\(\w+\))?: .*\bray::")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_NAME = r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Died|Timeout|Killed|Iteration)\w*"
_RAISED = re.compile(rf"(?P<type>{_NAME})(?:\((?P<inner>[\w.]+)\))?(?:: (?P<message>.*)|:?$)")
_INSIDE = re.compile(rf"(?<![\w.'\"])(?P<type>{_NAME})(?:\((?P<inner>[\w.]+)\))?: (?P<message>\S.*)")
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
# A line that cannot be part of a message: a log record, a table of torchrun's, the next prefix.
_OTHER = re.compile(r"\s*$|[-=]{8,}|\[?[IWEF]\d{4} |(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\d{4}-\d\d-\d\d|```")
_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*$")
_FRAMES = 40
_MESSAGE_LINES = 12
_MESSAGE_CHARACTERS = 4_000
# A traceback that was cut off, or a rank that writes nothing more, must not be waited for forever.
_PATIENCE = 400
_REMEMBERED = 200


@dataclass(kw_only=True)
class Raised:
    """One exception as a log has it.

    file, line: where it stands. source: who wrote it. time: seconds, of the last time stamp that this source wrote.
    frames: its traceback's, outermost first, as far as they were kept. handled: what was being handled when it came.
    """

    file: str
    line: int
    source: str
    time: float | None
    type: str
    message: str
    frames: list[str] = field(default_factory=list)
    handled: Raised | None = None

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass
class _Open:
    """A traceback of one source that is still being read."""

    began: int
    time: float | None
    frames: deque[str] = field(default_factory=lambda: deque(maxlen=_FRAMES))
    raised: Raised | None = None
    lines: int = 0


def anchors() -> list[str]:
    """The longest literal piece of each signature: a line without any, and without an exception, says nothing."""
    patterns = [pattern.pattern for entry in known_failures() for pattern in entry.signatures]
    return sorted({max(_literals(pattern), key=len) for pattern in patterns}, key=len)


def _literals(pattern: str) -> list[str]:
    pieces = re.split(r"\((?:\?[^)]*)?[^()]*\)\??|\[[^\]]*\]|\\\.|\\.[+*]?|[().?*+^$|]", pattern)
    return [piece for piece in pieces if piece]


class Reader:
    """Finds the exceptions of one file. Feed it the chunks in order, then ask for what is left.

    Most lines of a log are nobody's exception: they cost a few substring searches and nothing else.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._number = 0
        self._open: dict[str, _Open] = {}
        self._last: dict[str, Raised] = {}
        self._chained: set[str] = set()
        self._recent: deque[str] = deque(maxlen=_REMEMBERED)
        self._anchors = anchors()

    def read(self, text: str, lines: list[str]) -> Iterator[Raised]:
        present = [anchor for anchor in self._anchors if anchor in text]
        for raw in lines:
            self._number += 1
            if self._open or "rror" in raw or _BEGIN in raw or "xception" in raw or any(a in raw for a in present):
                yield from self._look(parsed(self._number, raw), present)
            self._recent.append(raw)

    def end(self) -> Iterator[Raised]:
        for source in list(self._open):
            yield from self._close(source)

    def _look(self, line: Line, present: list[str]) -> Iterator[Raised]:
        yield from self._give_up_on_old(line.number)
        if _BEGIN in line.text:
            yield from self._begin(line)
        elif _RAY_BEGIN.search(line.text):
            yield from self._close(line.source)
            self._open[line.source] = _Open(line.number, self._time(line))
        elif line.text.startswith(_CHAINED):
            yield from self._close(line.source)
            self._chained.add(line.source)
        elif line.source in self._open:
            yield from self._continue(self._open[line.source], line, present)
        else:
            yield from self._alone(line, present)

    def _begin(self, line: Line) -> Iterator[Raised]:
        yield from self._close(line.source)
        after = line.text.partition(_BEGIN)[2].lstrip(": ")
        opened = self._open[line.source] = _Open(line.number, self._time(line))
        if inside := list(_INSIDE.finditer(after)):
            # A whole traceback that lost its line breaks.
            opened.raised = self._raised(line, inside[-1], [after[: inside[-1].start()].strip()], opened.time)

    def _continue(self, opened: _Open, line: Line, present: list[str]) -> Iterator[Raised]:
        if opened.raised is None:
            self._frame_or_end(opened, line)
            return
        opened.lines += 1
        if opened.lines > _MESSAGE_LINES or any(other.match(line.text) for other in (_OTHER, _FRAME, _INSIDE)):
            yield from self._close(line.source)
            yield from self._alone(line, present)
            return
        message = f"{opened.raised.message}\n{line.text}"
        opened.raised.message = _REPEATED.sub("", message)[:_MESSAGE_CHARACTERS]

    def _frame_or_end(self, opened: _Open, line: Line) -> None:
        if _FRAME.match(line.text):
            opened.frames.append(line.text.strip()[:400])
        elif match := _RAISED.match(line.text.strip() if not opened.frames else line.text.removeprefix("  ")):
            opened.raised = self._raised(line, match, list(opened.frames), opened.time)

    def _alone(self, line: Line, present: list[str]) -> Iterator[Raised]:
        """A line outside of any traceback that has an exception in it, or a message that the catalogue knows."""
        if match := _INSIDE.search(line.text):
            opened = _Open(line.number, self._time(line), raised=self._raised(line, match, []))
            self._open[line.source] = opened
        elif any(anchor in line.text for anchor in present):
            yield Raised(
                file=self._file,
                line=line.number,
                source=line.source,
                time=self._time(line),
                type="",
                message=_REPEATED.sub("", line.text.strip())[:_MESSAGE_CHARACTERS],
            )

    def _raised(self, line: Line, match: re.Match[str], frames: list[str], time: float | None = None) -> Raised:
        return Raised(
            file=self._file,
            line=line.number,
            source=line.source,
            time=time if time is not None else self._time(line),
            # Ray's RayTaskError(RuntimeError) is the RuntimeError that it carries.
            type=(match["inner"] or match["type"]).rsplit(".", 1)[-1],
            message=_REPEATED.sub("", match["message"] or "")[:_MESSAGE_CHARACTERS],
            frames=frames,
        )

    def _close(self, source: str) -> Iterator[Raised]:
        opened = self._open.pop(source, None)
        if opened is None or opened.raised is None:
            return
        raised = opened.raised
        raised.message = raised.message.strip()
        if source in self._chained:
            self._chained.discard(source)
            raised.handled = self._last.get(source)
        self._last[source] = raised
        yield raised

    def _give_up_on_old(self, number: int) -> Iterator[Raised]:
        for source, opened in list(self._open.items()):
            if number - opened.began > _PATIENCE:
                yield from self._close(source)

    def _time(self, line: Line) -> float | None:
        """Of the line itself, or of the last one before it by the same source that has one."""
        if (own := time_of(line.raw)) is not None:
            return own
        for raw in reversed(self._recent):
            before = time_of(raw)
            if before is not None and parsed(0, raw).source == line.source:
                return before
        return None
