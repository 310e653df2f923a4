"""Reads the exceptions in a log: tracebacks of interleaved ranks, in the forms of Python, IPython or rich, whole or
damaged.
"""

from __future__ import annotations

import functools
import keyword
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from fsdp_doctor.explain.log_input import (
    BOX,
    SHORT_FRAME,
    Line,
    LogPiece,
    has_clock,
    parse_line,
    parse_time,
    split_lines,
)
from fsdp_doctor.known.catalogue import has_signature, list_anchors

# The literal pieces of signatures that are somewhere in what is being read.
_Present: TypeAlias = Callable[[], list[str]]

_BEGIN = "Traceback (most recent call last)"
# Ray says so before it repeats the traceback of a remote task.
_RAY_BEGIN = re.compile(r"RayTaskError(?:\((?P<inner>\w{1,200})\))?: .{0,400}\bray::")
_HANDLING = "During handling of the above exception"
# Errors that no handler recovers from: what fails while one is handled failed because of it.
_FATAL_ERROR = re.compile(r"OutOfMemoryError|out of memory|CUDA error|device-side assert|No space left on device")
_CHAINED = (_HANDLING, "The above exception was the direct cause")
_SUFFIX = r"(?:Error|Exception|Interrupt|Exit|Failure|Failed|Died|Timeout|Killed|Aborted)"
_NAME = rf"[A-Za-z_][\w.]{{0,200}}?(?:{_SUFFIX}|Warning|Iteration)\w{{0,40}}"
_COLON = r"(?:: |\uff1a ?)"
_RAISED = re.compile(
    rf"(?P<type>{_NAME})(?:\((?P<inner>[\w.]{{1,200}})\))?(?:{_COLON}(?P<message>.*)|:?\s{{0,20}}$)", re.ASCII
)
# After frames any name may be that of an exception.
_ANY = re.compile(r"(?P<type>[A-Za-z_][\w.]{0,200})(?P<inner>)(?:: (?P<message>.*)|$)", re.ASCII)
# Within a line: not in the quotes of source code, but in those of JSON.
_INSIDE = re.compile(
    rf"(?<![A-Za-z0-9_.'/\"])(?:(?<=: )\")?(?P<type>[A-Za-z_][\w.]{{0,200}}?{_SUFFIX}\w{{0,40}})"
    rf"(?:\((?P<inner>[\w.]{{1,200}})\))?{_COLON}(?P<message>\S.*)",
    re.ASCII,
)
# A line of source code, which may contain a message and raises nothing.
_SOURCE = re.compile(r"\s*(?:raise|assert|return|if|elif|else|except|p_assert|print|f?\"|f?'|//|\^+\s*$|~+)(?![a-z])")
# Messages of Ray, c10d, torchrun and Slurm about a process that is gone, which have not the form of an exception.
_LOST = re.compile(
    r"A worker died or was killed|The actor is dead because|recvValue failed|failed \(exitcode: -?\d|watchdog got stuck"
    r"|CANCELLED AT \S+ DUE TO (?:TIME LIMIT|PREEMPTION)"
)
# The interpreter's own message; the stack that follows has the innermost frame first.
_FATAL = re.compile(r"Fatal Python error: \S")
# The message of C++ about an exception that nothing caught; the exception's own is in the next line.
_TERMINATED = re.compile(r"terminate called after throwing an instance of '(?:\w{1,80}::){0,8}(?P<type>\w{1,80})'")
# A label that stood before a traceback, as of a container.
_LABEL = re.compile(r"(?:[\w./-]{1,100} {0,20}\| ?|\[[^\]\n]{1,100}\] ?|[\w./-]{1,100}: ?)$")
# A line that cannot be part of a message: a log record, a table of torchrun's, the next prefix.
_OTHER = re.compile(r"\s*$|[-=]{8,}|\[?[IWEF]\d{3,4} |(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|```|\(raylet\)")
_LEVEL = re.compile(r"[DIW](?:(?<=\bD)EBUG|(?<=\bI)NFO|(?<=\bW)ARN(?:ING)?)\b")
_GROUP = re.compile(r"^\s{0,400}[|+][ |+-]{0,400}")
_REPEATED = re.compile(r" \[repeated \d{1,9}x across cluster\].*$")
_MAX_FRAMES = 40
_MAX_MESSAGE_LINES = 12
# How many more lines a message has that stands above its frames.
_MAX_MESSAGE_ABOVE_FRAMES = 3
_MAX_MESSAGE_CHARACTERS = 4_000
# Of each line after the first: a line may list thousands of names.
_MAX_OF_A_LINE = 1_000
_MAX_BOX_LINES = 2_000
# A traceback that was cut off ends after so many lines of its source, or after so many lines of the log, which is
# checked every so many lines.
_MAX_OWN_LINES = 400
_MAX_LINES = 10_000
_SWEEP_EVERY = 512
_MAX_SOURCES = 16_384
_MAX_LABELS = 256
# How many lines with a time are remembered.
_REMEMBERED = 64

_MAX_FRAME = 400
_PYTHON = re.compile(r'\s{0,400}File "[^"\n]{1,1000}", line \d{1,9}')
_IPYTHON = re.compile(r"\s{0,40}File (?P<file>[^\s\"]{1,400}):(?P<line>\d{1,9}), in (?P<function>[\w.<>]{1,200})\(")
# In rich's box: a path that was broken at the width of the box, and numbered lines of source.
_RICH = re.compile(r"(?P<file>\S.{0,600}?):(?P<line>\d{1,9}) in (?P<function>\S.{0,200})")
_RICH_SOURCE = re.compile(r"\s{0,20}(?:❱\s{0,20})?\d{1,9} [│|]|[│╭╰]")
_RICH_MARKED = re.compile(r"\s{0,20}❱\s{0,20}\d{1,9} [│|](?P<code>.*)")
_RICH_BEGIN = re.compile(r"\S.{0,600}?\.pyx?:\d{1,9}(?: in\b|$)")
_FILE = re.compile(r'File "(?P<file>[^"]+)"')
# FSDP1's assertions print the message alone, behind the stack of the call, whose last frames are torch's own.
_ASSERTED = re.compile(r"Expects? [`\w]|Non-root FSDP instance|Asserting FSDP instance")
_RAISES = re.compile(r"raise\s+\S|assert\b")
# The statement at the end of a traceback that lost its exception, and the texts in it.
_RAISE_OF = re.compile(r"(?:^|\s)raise (?:\w{1,80}\.){0,8}(?P<type>\w{1,200})\b(?P<arguments>.{0,400})")
_TEXT = re.compile(r"""(?P<quote>["'])(?P<text>.{0,400}?)(?P=quote)""")
# Files of torch, installed or as source, of Python itself, and names that are no file.
_TORCH_OR_PYTHON = re.compile(
    r"(?:^|/)(?:torch|fsdp_doctor)/|^<|(?:^|/)(?:lib(?:64)?/python\d[\d.]*|python[\d.]+/lib)/"
)
_PACKAGE = re.compile(r"(?:^|/)(?:site|dist)-packages/(?!torch/)")
_IN_PACKAGE = re.compile(r"-packages/|\btorch/")
_BOX = tuple(BOX)
# A line of code that calls something; and a line that only marks a part of the one above it.
_CALLING = re.compile(
    r"\s*(?:(?:await|return|yield|with|if|for [\w, ]{1,80} in) )?(?:[\w.,\[\] ]{1,200} = )?"
    r"[\w.\[\]]{1,200}\(.*[(),:\]]$"
)
_MARKS = re.compile(r"\s*[\^~]+\s*$")
_LITERAL = re.compile(r"""["']([^"'\n]{1,400})""")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
# Number of equal characters in a row that are not a coincidence.
_MIN_EQUAL = 16


@dataclass(kw_only=True, slots=True)
class Raised:
    """One exception in a log.

    file, line: the place of the exception in the log.
    source: the rank or process that wrote the exception.
    time: the last time stamp that this source wrote, in seconds; None without time stamps.
    frames: the frames of the traceback, outermost first; at most the innermost 40.
    script: the file outside torch and Python whose own line raised the exception; empty if no such file is known.
    logged: whether the exception is in a log record of a level below ERROR.
    swallowed: whether another exception was raised while this exception was being handled.
    follows: whether this exception was raised during the handling of an exception from which no program recovers.
    quoted: whether the exception is only quoted in prose, and was not raised where it stands.
    cut: whether the log lacks the end of the traceback with its exception; ``message`` then says so.
    code: the line of code that raised the exception, as the log shows it below the innermost frame, or directly above a
        message without frames; empty if that line is only a ``raise`` or ``assert``.
    chained: whether the previous exception of the same source was the direct cause of this exception.
    asserted: the line of code that raised the exception if it is an assertion; empty otherwise.
    code_of: maps frames to their lines of code, if the log shows them.
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
    code: str = ""
    chained: bool = False
    asserted: str = ""
    code_of: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.type and self.message else self.type or self.message


@dataclass(slots=True)
class _Open:
    """A traceback of one source that is still being read.

    indent: the number of columns by which the whole traceback is indented.
    source: the line of code below the last frame; None until it was read.
    lines: the number of lines of this source since the traceback began.
    below: the frames below the exception, as in a log whose newest line comes first.
    box: the lines inside the box that rich draws around a traceback.
    fatal: whether this is the stack that the interpreter prints for a fatal error, innermost frame first.
    code_of: maps frames to their lines of code.
    remote: the type of exception that the header names; empty if it names none.
    """

    began: Line
    time: float | None
    indent: int = 0
    frames: list[str] = field(default_factory=list)
    raised: Raised | None = None
    source: str | None = None
    lines: int = 0
    message_lines: int = 0
    box: list[str] = field(default_factory=list)
    fatal: bool = False
    below: list[str] = field(default_factory=list)
    code_of: dict[str, str] = field(default_factory=dict)
    remote: str = ""

    def end_box(self) -> None:
        for frame, code in _list_frames_in_box(self.box):
            self.frames.append(frame)
            self.code_of[frame] = code
        self.box.clear()

    def add_code(self, text: str) -> None:
        """Adds a line of code to the innermost frame; a statement may have several lines."""
        if not _MARKS.match(text):
            code = f"{self.code_of.get(self.frames[-1], '')} {text.strip()}".strip()
            self.code_of[self.frames[-1]] = code[:_MAX_FRAME]


class ExceptionReader:
    """Finds the exceptions of one file. Call ``read`` with each piece in order, and then ``end``.

    Most lines of a log belong to no exception. Such a line costs only a few substring searches.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._found: list[Raised] = []
        self._next_sweep = 0
        # Ordered dictionaries, because what is first of a dictionary costs more the more was removed before it.
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._last: OrderedDict[str, Raised] = OrderedDict()
        self._following: set[str] = set()
        self._chained: set[str] = set()
        self._labels: tuple[str, ...] = ()
        # Of each source the last time; and the lines with a time that were not looked at so far.
        self._times: OrderedDict[str, float] = OrderedDict()
        self._recent: deque[str] = deque(maxlen=_REMEMBERED)
        self._above = ("", "")
        self._anchors = list_anchors()

    def read(self, piece: LogPiece) -> list[Raised]:
        # Found out once there is a line that nothing else decides: it takes as long as the rest of the reading.
        present = functools.cache(lambda: [anchor for anchor in self._anchors if anchor in piece.text])
        boxed = "│" in piece.text
        for number, raw in zip(piece.numbers, piece.lines, strict=True):
            if (
                self._open
                or "rror" in raw
                or 'File "' in raw
                or _BEGIN in raw
                or "xception" in raw
                or "recvValue" in raw
                or "failed (exitcode" in raw
                or "terminate called" in raw
                or "watchdog got stuck" in raw
                or "CANCELLED AT" in raw
                or any(a in raw for a in present())
                or (boxed and "│" in raw)
            ):
                if number >= self._next_sweep:
                    self._next_sweep = number + _SWEEP_EVERY
                    self._close_old(number)
                for line in split_lines(number, raw):
                    self._read_line(self._strip_label(line) if self._labels else line, present)
            if has_clock(raw):
                self._recent.append(raw)
            self._above = self._above[1], raw
        return self._take_found()

    def end(self) -> list[Raised]:
        for source in list(self._open):
            self._close(source)
        return self._take_found()

    def _take_found(self) -> list[Raised]:
        found, self._found = self._found, []
        return found

    def _strip_label(self, line: Line) -> Line:
        """Removes a container's label from the line if the label stood before a traceback, and adds the label to the
        line's source.
        """
        if line.text.startswith(self._labels):
            label = next(label for label in self._labels if line.text.startswith(label))
            source = " ".join(filter(None, (line.source, label.strip(" |:[]"))))
            return line._replace(source=source, text=line.text[len(label) :])
        return line

    def _read_line(self, line: Line, present: _Present) -> None:
        opened, stripped = self._open.get(line.source), line.text.lstrip()
        if opened is not None and opened.indent:
            line = line._replace(text=line.text[min(opened.indent, _measure_indent(line.text)) :])
        if opened is not None and stripped.startswith(("|", "+-")):
            line = line._replace(text=_GROUP.sub("", line.text))
            stripped = line.text.lstrip()
        if stripped.startswith(_BOX):
            self._read_boxed(line)
        elif _BEGIN in line.text:
            self._begin(line)
        elif "RayTaskError" in line.text and (ray := _RAY_BEGIN.search(line.text)):
            # The traceback before it belongs to the driver, and goes on with this one.
            if opened is not None and opened.raised is None:
                del self._open[line.source]
            self._close(line.source)
            self._chained.add(line.source)
            self._open[line.source] = _Open(line, self._find_time(line), remote=ray["inner"] or "")
        elif stripped.startswith(_CHAINED):
            self._close(line.source)
            if _HANDLING not in line.text:
                self._chained.add(line.source)
            if _HANDLING in line.text and line.source in self._last:
                last = self._last[line.source]
                last.swallowed = _FATAL_ERROR.search(last.text) is None
                if not last.swallowed:
                    self._following.add(line.source)
        elif opened is not None:
            self._continue(opened, line, present)
        else:
            self._read_alone(line, present)

    def _begin(self, line: Line) -> None:
        before, _, after = line.text.partition(_BEGIN)
        if _LABEL.match(before) and "Exception Group" not in before and len(self._labels) < _MAX_LABELS:
            self._labels = tuple(dict.fromkeys((*self._labels, before)))
            line = self._strip_label(line)
        self._close(line.source)
        opened = self._open[line.source] = _Open(line, self._find_time(line), indent=_measure_indent(line.text))
        after = after.lstrip(": ")
        if matches := list(_INSIDE.finditer(after)):
            # A whole traceback that lost its line breaks.
            before = after[: matches[-1].start()].strip()
            opened.raised = self._parse_raised(line, matches[-1], [before[:_MAX_MESSAGE_CHARACTERS]], opened.time)

    def _read_boxed(self, line: Line) -> None:
        """Reads a line of a box. The box is a traceback if its top edge, its frames or its ``❱`` marker show one."""
        opened = self._open.get(line.source)
        lid = line.text.lstrip().startswith("╭")
        if (lid and _BEGIN in line.text) or ((opened is None or opened.raised is not None) and _begins_box(line.text)):
            self._close(line.source)
            opened = self._open[line.source] = _Open(line, self._find_time(line), indent=_measure_indent(line.text))
        if opened is None or lid:
            return
        if line.text.lstrip().startswith("╰"):
            opened.end_box()
        elif len(opened.box) < _MAX_BOX_LINES:
            opened.box.append(_read_box_content(line.text))

    def _continue(self, opened: _Open, line: Line, present: _Present) -> None:
        opened.lines += 1
        if opened.raised is None:
            self._read_frame_or_end(opened, line)
            if opened.raised is None and opened.lines > _MAX_OWN_LINES:
                self._close(line.source)
            return
        if opened.fatal and (frame := _parse_frame(line.text)) is not None and len(opened.raised.frames) < _MAX_FRAMES:
            opened.raised.frames.insert(0, frame)
            return
        if (
            not opened.raised.frames
            and (opened.below or opened.message_lines <= _MAX_MESSAGE_ABOVE_FRAMES)
            and self._read_below(opened, line)
        ):
            return
        if opened.fatal and (not line.text.strip() or "most recent call first" in line.text):
            return
        opened.message_lines += 1
        is_next = line.stamped and not opened.began.stamped
        other = is_next or _OTHER.match(line.text) or _parse_frame(line.text) is not None or _INSIDE.match(line.text)
        if opened.message_lines > _MAX_MESSAGE_LINES or other:
            self._close(line.source)
            self._read_alone(line, present)
            return
        message = f"{opened.raised.message}\n{line.text[:_MAX_OF_A_LINE]}"
        opened.raised.message = _strip_repeated(message)[:_MAX_MESSAGE_CHARACTERS]

    def _read_below(self, opened: _Open, line: Line) -> bool:
        """Reads a frame below the exception, or the frame's line of code; returns False for any other line."""
        frame = _parse_frame(line.text)
        if frame is None and (short := SHORT_FRAME.match(line.text.strip())):
            frame = _write_as_python(short)
        if frame is not None and len(opened.below) < _MAX_FRAMES:
            opened.below.append(_strip_repeated(frame))
            return True
        if not opened.below:
            return False
        if _BEGIN in line.text or line.text.startswith("   "):
            return True
        if _RAISED.match(line.text.strip()) or has_signature(line.text):
            # The frames are those of the next exception.
            frames, opened.below = opened.below, []
            self._close(line.source)
            self._open[line.source] = _Open(line, self._find_time(line), frames=frames)
            self._read_frame_or_end(self._open[line.source], line)
            return True
        return False

    def _read_frame_or_end(self, opened: _Open, line: Line) -> None:
        opened.end_box()
        if (frame := _parse_frame(line.text)) is not None:
            if not opened.frames:
                opened.indent += max(0, _measure_indent(line.text) - 2)
            opened.frames.append(_strip_repeated(frame))
            opened.source = None
            return
        text = _strip_repeated(line.text)
        if opened.frames and text.startswith("   "):
            opened.source = opened.source or text.strip()
            opened.add_code(text)
            return
        match = _RAISED.match(text.removeprefix("  ") if opened.frames else text.strip())
        if match is None and opened.frames and (bare := _ANY.match(text)) and not keyword.iskeyword(bare["type"]):
            match = bare
        if match is not None:
            opened.raised = self._parse_raised(line, match, opened.frames, opened.time)
            if opened.source is not None and opened.source.startswith("assert "):
                opened.raised.asserted = opened.source[:_MAX_FRAME]
            if opened.source is not None and not _RAISES.match(opened.source):
                opened.raised.code = opened.source[:_MAX_FRAME]
            if opened.frames and opened.source is not None:
                opened.raised.script = _find_raising_file(opened.frames[-1], opened.source, opened.raised.message)
        elif opened.frames and "torch/distributed/" in opened.frames[-1].replace("\\", "/") and _ASSERTED.match(text):
            opened.raised = self._make_raised(line, opened.frames, "AssertionError", text)
        elif not text[:1].isspace() and not _SOURCE.match(text) and has_signature(text):
            opened.raised = self._make_raised(line, opened.frames)
        elif opened.source is None and opened.frames:
            opened.source = text.strip()
            opened.add_code(text)

    def _read_alone(self, line: Line, present: _Present) -> None:
        """Reads a line outside any traceback: a frame without a header, an exception, or a known message."""
        if (frame := _parse_frame(line.text)) is not None:
            # A frame is two columns within its traceback.
            indent = _measure_indent(line.text)
            self._open[line.source] = opened = _Open(line, self._find_time(line), indent=indent - 2 * (indent > 1))
            opened.frames.append(_strip_repeated(frame))
        elif (match := _INSIDE.search(line.text)) and not _SOURCE.match(line.text):
            raised = self._parse_raised(line, match, [])
            raised.logged = _LEVEL.search(line.raw[:200]) is not None
            raised.code = self._find_code_above(line)
            raised.asserted = self._find_assertion_above(line)
            self._open[line.source] = _Open(line, raised.time, indent=_measure_indent(line.text), raised=raised)
        elif _FATAL.match(line.text.lstrip()):
            raised = self._make_raised(line, [])
            self._open[line.source] = _Open(line, raised.time, raised=raised, fatal=True)
        elif any(a in line.text for a in present()) and not _SOURCE.match(line.text) and has_signature(line.text):
            message = self._make_raised(line, [])
            message.quoted = "Warning: " not in line.text
            message.asserted = self._find_assertion_above(line)
            self._found.append(message)
        elif match := _TERMINATED.search(line.text):
            raised = self._make_raised(line, [], match["type"], "")
            self._open[line.source] = _Open(line, raised.time, raised=raised)
        elif _LOST.search(line.text):
            self._found.append(self._make_raised(line, []))

    def _find_code_above(self, line: Line) -> str:
        """Returns the line of code directly above a message without frames, if the same source wrote both; empty
        otherwise.
        """
        marked, above = (parse_line(0, raw) for raw in self._above)
        code = marked if _MARKS.match(above.text) else above
        is_code = code.source == line.source and _CALLING.match(code.text) and not _RAISES.match(code.text.strip())
        return code.text.strip()[:_MAX_FRAME] if is_code else ""

    def _find_assertion_above(self, line: Line) -> str:
        """Returns the assertion directly above an exception without frames, if the same source wrote both; empty
        otherwise.
        """
        above = parse_line(0, self._above[1])
        text = above.text.strip()
        return text[:_MAX_FRAME] if above.source == line.source and text.startswith("assert ") else ""

    def _parse_raised(self, line: Line, match: re.Match[str], frames: list[str], time: float | None = None) -> Raised:
        # Ray's RayTaskError(RuntimeError) carries a RuntimeError.
        name = (match["inner"] or match["type"]).rsplit(".", 1)[-1]
        raised = self._make_raised(line, frames, name, match["message"] or "")
        raised.time = time if time is not None else raised.time
        return raised

    def _make_raised(self, line: Line, frames: list[str], name: str = "", message: str | None = None) -> Raised:
        return Raised(
            file=self._file,
            line=line.number,
            source=line.source,
            time=self._find_time(line),
            type=name,
            message=_strip_repeated(line.text.strip() if message is None else message)[:_MAX_MESSAGE_CHARACTERS],
            frames=frames[-_MAX_FRAMES:],
        )

    def _close(self, source: str) -> None:
        opened = self._open.pop(source, None)
        if opened is None:
            return
        opened.end_box()
        raised = opened.raised
        if raised is None and opened.frames and (statement := _find_raise(opened)):
            raised = self._make_raised(opened.began, opened.frames, opened.remote, _read_texts(statement["arguments"]))
            source = statement[0].strip()
            raised.script = _find_raising_file(opened.frames[-1], source, raised.message)
        elif raised is None and opened.frames:
            cut = "a traceback that was cut off before its exception"
            raised = self._make_raised(opened.began, opened.frames, message=cut)
            raised.cut = True
        if raised is not None:
            if opened.below and not raised.frames:
                raised.frames = _order_frames(opened.below)
            raised.code_of = opened.code_of
            raised.message = raised.message.strip()
            raised.follows = source in self._following
            self._following.discard(source)
            raised.chained = source in self._chained
            self._chained.discard(source)
            self._last[source] = raised
            self._found.append(raised)

    def _close_old(self, number: int) -> None:
        """Ends tracebacks that have had no line for a long time, the oldest first."""
        while self._open:
            source, opened = next(iter(self._open.items()))
            if number - opened.began.number <= _MAX_LINES and len(self._open) <= _MAX_SOURCES:
                break
            self._close(source)
        for by_source in (self._last, self._times):
            while len(by_source) > _MAX_SOURCES:
                by_source.popitem(last=False)

    def _find_time(self, line: Line) -> float | None:
        """Returns the time of the line or, if it has none, of the last line with a time that the same source wrote
        before.
        """
        while self._recent:
            raw = self._recent.popleft()
            if (time := parse_time(raw)) is not None:
                self._times[parse_line(0, raw).source] = time
        if (of_line := parse_time(line.raw)) is not None:
            self._times[line.source] = of_line
        return self._times.get(line.source)


def _find_raise(opened: _Open) -> re.Match[str] | None:
    """Finds the ``raise`` of the exception that the header names, in the innermost frame's line of code.

    Returns None if this line does not raise the exception.
    """
    statement = _RAISE_OF.search(opened.code_of.get(opened.frames[-1], ""))
    return statement if statement is not None and statement["type"] == opened.remote else None


def _read_texts(arguments: str) -> str:
    """Joins the literal texts in the arguments of an exception."""
    return "".join(match["text"] for match in _TEXT.finditer(arguments))


def _order_frames(frames: list[str]) -> list[str]:
    """Returns frames that stood below an exception, outermost frame first.

    The frames are reversed if the newest line of the log comes first.
    """
    is_reversed = frames[-1].endswith("in <module>") or (
        _IN_PACKAGE.search(frames[0]) and not _IN_PACKAGE.search(frames[-1])
    )
    return frames[::-1] if is_reversed else frames


def _strip_repeated(text: str) -> str:
    """Removes Ray's note of how often a line was repeated."""
    return _REPEATED.sub("", text) if "[repeated" in text else text


def _measure_indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def _parse_frame(text: str) -> str | None:
    """Returns the traceback frame in a line, written as Python writes it; None if the line has no frame."""
    if "File " not in text:
        return None
    if _PYTHON.match(text):
        return text.strip()[:_MAX_FRAME]
    if match := _IPYTHON.match(text):
        return _write_as_python(match)
    return None


def _find_raising_file(innermost: str, source: str, message: str) -> str:
    """Returns the file of a traceback's innermost frame, if the frame's own line raised the message; else empty.

    A line without ``raise`` or ``assert`` may have called C++, which raises without a frame. A line in a package must
    contain words of the message, because packages also raise torch's exceptions again.

    source: the line of code of the innermost frame.
    """
    if not _RAISES.match(source) or (match := _FILE.match(innermost)) is None:
        return ""
    file = match["file"].replace("\\", "/").lower()
    if _PACKAGE.search(file):
        return match["file"] if _has_words_of(source, message) else ""
    return "" if _TORCH_OR_PYTHON.search(file) else match["file"]


def _has_words_of(source: str, message: str) -> bool:
    pieces = (piece for literal in _LITERAL.findall(source) for piece in _PLACEHOLDER.split(literal))
    return any(len(piece) >= _MIN_EQUAL and piece in message for piece in pieces)


def _begins_box(text: str) -> bool:
    """Returns whether a line in a box belongs to a traceback: it contains a frame or the ``❱`` marker."""
    content = _read_box_content(text)
    return "❱" in content or _RICH_BEGIN.match(content) is not None


def _read_box_content(text: str) -> str:
    """Returns the text between the sides of the box, with its indentation."""
    text = text.strip().removeprefix("│").removeprefix("┃").removeprefix(" ")
    return text.removesuffix("│").removesuffix("┃").rstrip()


def _list_frames_in_box(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the frames in the content of one box, each with the line of code that the box marks."""
    joined, frame, code = "", "", ""
    for line in (*lines, ""):
        if line and not _RICH_SOURCE.match(line) and len(joined) < _MAX_FRAME:
            # A line that was broken at a space has lost the space.
            joined += f" {line}" if line.startswith("in ") or joined.endswith(" in") else line
            continue
        if match := _RICH.match(joined):
            if frame:
                yield frame, code
            frame, code = _write_as_python(match), ""
        if marked := _RICH_MARKED.match(line):
            code = marked["code"].strip()[:_MAX_FRAME]
        joined = ""
    if frame:
        yield frame, code


def _write_as_python(match: re.Match[str]) -> str:
    return f'File "{match["file"]}", line {match["line"]}, in {match["function"]}'[:_MAX_FRAME]
