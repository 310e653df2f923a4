"""The exceptions in a log: tracebacks taken out of interleaved ranks, and those that lost their form on the way."""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdp_doctor.explain.frames import begins_box, frame_in, frames_in_box, inner, is_boxed, raising_file
from fsdp_doctor.explain.log_lines import Line, lines_in, parsed, time_of
from fsdp_doctor.known.catalogue import anchors, has_signature

_BEGIN = "Traceback (most recent call last)"
# Ray says so before it repeats the traceback of a remote task.
_RAY_BEGIN = re.compile(r"RayTaskError(?:\(\w{1,200}\))?: .{0,400}\bray::")
_HANDLING = "During handling of the above exception"
# What no handler is for: whatever fails while it is handled has failed because of it.
_MENDED_BY_NONE = re.compile(r"OutOfMemoryError|out of memory|CUDA error|device-side assert|No space left on device")
_CHAINED = (_HANDLING, "The above exception was the direct cause")
_SUFFIX = r"(?:Error|Exception|Interrupt|Exit|Failure|Failed|Died|Timeout|Killed|Aborted)"
_NAME = rf"[A-Za-z_][\w.]{{0,200}}?(?:{_SUFFIX}|Warning|Iteration)\w{{0,40}}"
_COLON = r"(?:: |\uff1a ?)"
_RAISED = re.compile(
    rf"(?P<type>{_NAME})(?:\((?P<inner>[\w.]{{1,200}})\))?(?:{_COLON}(?P<message>.*)|:?\s{{0,20}}$)", re.ASCII
)
# After frames any name may be an exception's.
_ANY = re.compile(r"(?P<type>[A-Za-z_][\w.]{0,200})(?P<inner>)(?:: (?P<message>.*)|$)", re.ASCII)
# Within a line: not in the quotes of a program's source, but in those of JSON.
_INSIDE = re.compile(
    rf"(?<![A-Za-z0-9_.'/\"])(?:(?<=: )\")?(?P<type>[A-Za-z_][\w.]{{0,200}}?{_SUFFIX}\w{{0,40}})"
    rf"(?:\((?P<inner>[\w.]{{1,200}})\))?{_COLON}(?P<message>\S.*)",
    re.ASCII,
)
# A line of a program, which may have a message in it and raises nothing by standing in a log.
_SOURCE = re.compile(r"\s*(?:raise|assert|return|if|elif|else|except|p_assert|print|f?\"|f?'|//|\^+\s*$|~+)(?![a-z])")
# What Ray, c10d and torchrun say of a process that is gone, in no exception's form.
_LOST = re.compile(r"A worker died or was killed|The actor is dead because|recvValue failed|failed \(exitcode: -?\d")
# What the interpreter itself says; the stack that follows has the innermost frame first.
_FATAL = re.compile(r"Fatal Python error: \S")
# What C++ says of an exception that nothing caught; its message is in the next line.
_TERMINATED = re.compile(r"terminate called after throwing an instance of '(?:\w{1,80}::){0,8}(?P<type>\w{1,80})'")
# A label that stood before a traceback, as of a container.
_LABEL = re.compile(r"(?:[\w./-]{1,100} {0,20}\| ?|\[[^\]\n]{1,100}\] ?|[\w./-]{1,100}: ?)$")
# A line that cannot be part of a message: a log record, a table of torchrun's, the next prefix.
_OTHER = re.compile(
    r"\s*$|[-=]{8,}|\[?[IWEF]\d{3,4} |(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\d{4}-\d\d-\d\d|```|\(raylet\)"
)
_LEVEL = re.compile(r"\b(?:DEBUG|INFO|WARN|WARNING)\b")
_GROUP = re.compile(r"^\s{0,400}[|+][ |+-]{0,400}")
_REPEATED = re.compile(r" \[repeated \d{1,9}x across cluster\].*$")
_MOST_FRAMES = 40
_MOST_MESSAGE_LINES = 12
_MOST_MESSAGE_CHARACTERS = 4_000
# Of a line after the first: what comes after thousands of names may say more than they do.
_MOST_OF_A_LINE = 1_000
_MOST_BOX_LINES = 2_000
# A traceback that was cut off ends after so many lines of its source; one whose source writes nothing more, after so
# many lines of the log, which is looked at every so many lines.
_MOST_OWN_LINES = 400
_MOST_LINES = 50_000
_SWEEP_EVERY = 512
_MOST_SOURCES = 16_384
_MOST_LABELS = 256
# How many lines with a time are remembered; the time stands near the beginning of a line.
_REMEMBERED = 64
_CLOCK = re.compile(r"\d\d:\d\d:\d\d")
_CLOCK_END = 160


@dataclass(kw_only=True)
class Raised:
    """One exception as a log has it.

    file, line: where it stands. source: who wrote it. time: seconds, of the last time stamp that this source wrote.
    frames: its traceback's, outermost first, as far as they were kept. script: the file, not torch's, whose own line
    raised it; empty where none is known to have. logged: it stands in a record below an error's
    level. swallowed: another exception came while it was being handled. follows: it came itself while one was being
    handled that no handler mends. quoted: a message that nothing raised, in prose.
    cut: a traceback that ends before its exception, whose message says no more than that.
    """

    file: str
    line: int
    source: str
    time: float | None
    type: str
    message: str
    frames: list[str] = field(default_factory=list)
    script: str = ""
    logged: bool = False
    swallowed: bool = False
    follows: bool = False
    quoted: bool = False
    cut: bool = False

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.type and self.message else self.type or self.message


@dataclass
class _Open:
    """A traceback of one source that is still being read. lines: of this source since it began. box: what rich drew.

    source: the last frame's own line; None until it was read.
    fatal: it is the interpreter's stack, innermost frame first.
    """

    began: Line
    time: float | None
    frames: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_FRAMES))
    raised: Raised | None = None
    source: str | None = None
    lines: int = 0
    message_lines: int = 0
    box: list[str] = field(default_factory=list)
    fatal: bool = False

    def end_box(self) -> None:
        self.frames.extend(frames_in_box(self.box))
        self.box.clear()


class Reader:
    """Finds the exceptions of one file. Feed it the chunks in order, then ask for what is left.

    Most lines of a log are nobody's exception: they cost a few substring searches and nothing else.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._number = 0
        self._open: dict[str, _Open] = {}
        self._last: dict[str, Raised] = {}
        self._following: set[str] = set()
        self._labels: tuple[str, ...] = ()
        self._recent: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._stamped: dict[str, tuple[int, float | None]] = {}
        self._anchors = anchors()

    def read(self, text: str, lines: list[str]) -> Iterator[Raised]:
        present = [anchor for anchor in self._anchors if anchor in text]
        boxed = "│" in text
        for raw in lines:
            self._number += 1
            if (
                self._open
                or "rror" in raw
                or 'File "' in raw
                or _BEGIN in raw
                or "xception" in raw
                or "recvValue" in raw
                or "failed (exitcode" in raw
                or "terminate called" in raw
                or any(a in raw for a in present)
                or (boxed and "│" in raw)
            ):
                for line in lines_in(self._number, raw):
                    yield from self._look(self._labelled(line), present)
            if _CLOCK.search(raw, 0, _CLOCK_END):
                self._recent.append((self._number, raw))

    def end(self) -> Iterator[Raised]:
        for source in list(self._open):
            yield from self._close(source)

    def _labelled(self, line: Line) -> Line:
        """Takes off a label that stood before a traceback, as of a container: it is the source, whatever it means."""
        if self._labels and line.text.startswith(self._labels):
            label = next(label for label in self._labels if line.text.startswith(label))
            source = " ".join(filter(None, (line.source, label.strip(" |:[]"))))
            return dataclasses.replace(line, source=source, text=line.text[len(label) :])
        return line

    def _look(self, line: Line, present: list[str]) -> Iterator[Raised]:
        if self._number % _SWEEP_EVERY == 0:
            yield from self._give_up_on_old()
        if line.source in self._open and line.text.lstrip().startswith(("|", "+-")):
            line = dataclasses.replace(line, text=_GROUP.sub("", line.text))
        if is_boxed(line.text):
            yield from self._boxed(line)
        elif _BEGIN in line.text:
            yield from self._begin(line)
        elif _RAY_BEGIN.search(line.text):
            # The traceback before it is the driver's, and goes on with this one.
            if (opened := self._open.get(line.source)) is not None and opened.raised is None:
                del self._open[line.source]
            yield from self._close(line.source)
            self._open[line.source] = _Open(line, self._time(line))
        elif line.text.startswith(_CHAINED):
            yield from self._close(line.source)
            if line.text.startswith(_HANDLING) and line.source in self._last:
                last = self._last[line.source]
                last.swallowed = _MENDED_BY_NONE.search(last.text) is None
                if not last.swallowed:
                    self._following.add(line.source)
        elif line.source in self._open:
            yield from self._continue(self._open[line.source], line, present)
        else:
            yield from self._alone(line, present)

    def _begin(self, line: Line) -> Iterator[Raised]:
        before, _, after = line.text.partition(_BEGIN)
        if _LABEL.match(before) and "Exception Group" not in before and len(self._labels) < _MOST_LABELS:
            self._labels = tuple(dict.fromkeys((*self._labels, before)))
            line = self._labelled(line)
        yield from self._close(line.source)
        opened = self._open[line.source] = _Open(line, self._time(line))
        after = after.lstrip(": ")
        if inside := list(_INSIDE.finditer(after)):
            # A whole traceback that lost its line breaks.
            before = after[: inside[-1].start()].strip()
            opened.raised = self._raised(line, inside[-1], [before[:_MOST_MESSAGE_CHARACTERS]], opened.time)

    def _boxed(self, line: Line) -> Iterator[Raised]:
        """A line of a box, which is a traceback's if it says so in its lid, its frames or its marker."""
        opened = self._open.get(line.source)
        lid = line.text.lstrip().startswith("╭")
        if (lid and _BEGIN in line.text) or ((opened is None or opened.raised is not None) and begins_box(line.text)):
            yield from self._close(line.source)
            opened = self._open[line.source] = _Open(line, self._time(line))
        if opened is None or lid:
            return
        if line.text.lstrip().startswith("╰"):
            opened.end_box()
        elif len(opened.box) < _MOST_BOX_LINES:
            opened.box.append(inner(line.text))

    def _continue(self, opened: _Open, line: Line, present: list[str]) -> Iterator[Raised]:
        opened.lines += 1
        if opened.raised is None:
            self._frame_or_end(opened, line)
            if opened.raised is None and opened.lines > _MOST_OWN_LINES:
                yield from self._close(line.source)
            return
        if opened.fatal and (frame := frame_in(line.text)) is not None and len(opened.raised.frames) < _MOST_FRAMES:
            opened.raised.frames.insert(0, frame)
            return
        if opened.fatal and (not line.text.strip() or "most recent call first" in line.text):
            return
        opened.message_lines += 1
        other = _OTHER.match(line.text) or frame_in(line.text) is not None or _INSIDE.match(line.text)
        if opened.message_lines > _MOST_MESSAGE_LINES or other:
            yield from self._close(line.source)
            yield from self._alone(line, present)
            return
        message = f"{opened.raised.message}\n{line.text[:_MOST_OF_A_LINE]}"
        opened.raised.message = _REPEATED.sub("", message)[:_MOST_MESSAGE_CHARACTERS]

    def _frame_or_end(self, opened: _Open, line: Line) -> None:
        if opened.box:
            opened.end_box()
        if (frame := frame_in(line.text)) is not None:
            opened.frames.append(_REPEATED.sub("", frame))
            opened.source = None
            return
        text = _REPEATED.sub("", line.text)
        match = _RAISED.match(text.removeprefix("  ") if opened.frames else text.strip())
        if match is None and opened.frames and (named := _ANY.match(text)) and not keyword.iskeyword(named["type"]):
            match = named
        if match is not None:
            opened.raised = self._raised(line, match, list(opened.frames), opened.time)
            if opened.frames and opened.source is not None:
                opened.raised.script = raising_file(opened.frames[-1], opened.source, opened.raised.message)
        elif not text[:1].isspace() and not _SOURCE.match(text) and has_signature(text):
            opened.raised = self._message(line, list(opened.frames))
        elif opened.source is None and opened.frames:
            opened.source = text.strip()

    def _alone(self, line: Line, present: list[str]) -> Iterator[Raised]:
        """A line outside of any traceback: a frame whose beginning is missing, an exception, or a known message."""
        if (frame := frame_in(line.text)) is not None:
            self._open[line.source] = opened = _Open(line, self._time(line))
            opened.frames.append(_REPEATED.sub("", frame))
        elif (match := _INSIDE.search(line.text)) and not _SOURCE.match(line.text):
            raised = self._raised(line, match, [])
            raised.logged = _LEVEL.search(line.raw[:200]) is not None
            self._open[line.source] = _Open(line, raised.time, raised=raised)
        elif _FATAL.match(line.text):
            raised = self._message(line, [])
            self._open[line.source] = _Open(line, raised.time, raised=raised, fatal=True)
        elif any(a in line.text for a in present) and not _SOURCE.match(line.text) and has_signature(line.text):
            message = self._message(line, [])
            message.quoted = "Warning: " not in line.text
            yield message
        elif match := _TERMINATED.search(line.text):
            raised = self._message(line, [])
            raised.type, raised.message = match["type"], ""
            self._open[line.source] = _Open(line, raised.time, raised=raised)
        elif _LOST.search(line.text):
            yield self._message(line, [])

    def _raised(self, line: Line, match: re.Match[str], frames: list[str], time: float | None = None) -> Raised:
        raised = self._message(line, frames)
        # Ray's RayTaskError(RuntimeError) is the RuntimeError that it carries.
        raised.type = (match["inner"] or match["type"]).rsplit(".", 1)[-1]
        raised.message = _REPEATED.sub("", match["message"] or "")[:_MOST_MESSAGE_CHARACTERS]
        raised.time = time if time is not None else raised.time
        return raised

    def _message(self, line: Line, frames: list[str]) -> Raised:
        return Raised(
            file=self._file,
            line=line.number,
            source=line.source,
            time=self._time(line),
            type="",
            message=_REPEATED.sub("", line.text.strip())[:_MOST_MESSAGE_CHARACTERS],
            frames=frames,
        )

    def _close(self, source: str) -> Iterator[Raised]:
        opened = self._open.pop(source, None)
        if opened is None:
            return
        opened.end_box()
        raised = opened.raised
        if raised is None and opened.frames:
            raised = self._message(opened.began, list(opened.frames))
            raised.message = "a traceback that was cut off before its exception"
            raised.cut = True
        if raised is not None:
            raised.message = raised.message.strip()
            raised.follows = source in self._following
            self._following.discard(source)
            self._last[source] = raised
            yield raised

    def _give_up_on_old(self) -> Iterator[Raised]:
        """They are in the order in which they began."""
        while self._open:
            source, opened = next(iter(self._open.items()))
            if self._number - opened.began.number <= _MOST_LINES and len(self._open) <= _MOST_SOURCES:
                break
            yield from self._close(source)
        for remembered in (self._last, self._stamped):
            while len(remembered) > _MOST_SOURCES:
                del remembered[next(iter(remembered))]

    def _time(self, line: Line) -> float | None:
        """Of the line itself, or of the last one before it by the same source that has one."""
        searched, found = self._stamped.get(line.source, (0, None))
        if (own := time_of(line.raw)) is not None:
            found = own
        else:
            for number, raw in reversed(self._recent):
                if number <= searched:
                    break
                if (before := time_of(raw)) is not None and parsed(0, raw).source == line.source:
                    found = before
                    break
        self._stamped[line.source] = (line.number, found)
        return found
