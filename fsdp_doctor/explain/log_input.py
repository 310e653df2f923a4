"""Reads a log, in whatever form it was kept or pasted, as lines with the rank or process that wrote each.

Only this module and ``log_forms`` handle encodings, colours, line ends, the width of a terminal, and prefixes.
"""

from __future__ import annotations

import builtins
import codecs
import itertools
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from fsdp_doctor.errors import UsageError
from fsdp_doctor.explain.log_forms import ANSI, COLOUR_ALONE, FormReader, join_words, measure_words_width
from fsdp_doctor.machine.waited_input import read_parts

_CHUNK = 1 << 20
_MAX_LINE = 1 << 14
# The limit for a stream that is not a file, and for what a compressed file becomes: these may have no end.
MAX_STREAM = 512 << 20
_GZIP = b"\x1f\x8b"
_MAGIC = (b"\x7fELF", b"PK\x03\x04", b"\x89PNG", b"\x80\x02")
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
# Control characters that no program writes into its log.
_NOT_TEXT = bytes({*range(8), *range(14, 27), *range(28, 32), 127})
# It begins with a literal, which is found faster than a digit.
_CLOCK = re.compile(r":(?<=\d\d:)\d\d:\d\d")
_CLOCK_END = 160
_STAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
# glog's, as c10d writes it: [E1121 12:34:56.789012345 ProcessGroupNCCL.cpp:616]. It has no year.
_GLOG = re.compile(r"\[?[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)"
_DATE = r"\d{4}-\d\d-\d\d[ T_]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"

# One space, where it is not one of the even number of them by which Python indents.
_SPACE = r"(?:[ ](?=(?:[ ]{2}){0,100}(?:\S|$)))?"

# The prefixes of torchrun, Ray, srun, containers, pytest and loggers; the groups name who wrote the line.
_PREFIX = re.compile(
    rf"""[ \t]{{0,16}}(?:
      \[rank(?P<rank>\d{{1,9}})\]:{_SPACE}
    | \((?:[\w.:<>\- ]{{0,80}}\ )?pid=(?P<pid>\d{{1,12}})(?:,\ ip=(?P<ip>[^,)\s]{{1,80}}))?[^)\n]{{0,200}}\)[ ]?
    | \[[A-Za-z_-]{{1,40}}(?P<local>\d{{1,9}})(?:\|\d{{1,9}})?\]:{_SPACE}
    | (?P<task>\d{{1,5}}):[ ]
    | \d{{4}}-\d\d-\d\dT[\d:.]{{1,30}}Z?[ ](?:stdout|stderr)[ ][FP][ ]
      # A logger's: time, name, level.
    | {_DATE}[ ]{{1,4}}[-|][ ]{{1,4}}[^\s|]{{1,80}}[ ]{{1,4}}[-|][ ]{{1,4}}{_LEVEL}[ ]{{1,8}}[-|][ ]?
    | {_LEVEL}[ ]{{1,4}}\d\d-\d\d[ ]\d\d:\d\d:\d\d[ ]\[[\w.]{{1,60}}:\d{{1,6}}\][ ]?
    | (?P<stamp>{_DATE}[ ]?)
    | \d{{4}}/\d\d/\d\d[ ]\d\d:\d\d:\d\d[ ]
    | \[\d{{4}}-\d\d-\d\d[ T_]\d\d:\d\d:\d\d[^\]\s]{{0,20}}(?:[ ][^\]\s]{{1,20}})?\][ ]
      # A viewer's line number, a container's label, pytest's mark.
    | \[\d{{1,9}}\][ ](?=\[rank\d)
    | [A-Za-z][\w.-]{{0,60}}-\d{{1,6}}[ ]{{1,20}}\|[ ]
    | E(?:[ ]{{3}}|[ ]{{0,2}}$)
    | (?:>[ ]?){{1,8}}
    )""",
    re.VERBOSE,
)
# Where the next line begins in one that was joined of several.
_JOINT = re.compile(r"(?<=\S)[ ]{3,400}(?=\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)|(?<=[^\s>|])(?=\[rank\d{1,9}\]:)")
# What no terminal makes of the rest of a line that it has broken.
_BEGINNING = re.compile(rf"\s\s|Traceback|During handling|The above|```|[-=*]{{4}}|{_LEVEL}\b")
_DIGIT = re.compile(r"\d")
_EXCEPTION = re.compile(r"[\w.]{1,80}(?:Error|Exception)\b")
# An exception of Python itself, whose whole name is not the rest of a broken word.
_OF_PYTHON = re.compile(rf"(?:{'|'.join(name for name in dir(builtins) if name.endswith('Error'))}):(?: |$)")
# A frame as people shorten it.
SHORT_FRAME = re.compile(
    r"(?P<file>[\w./-]{1,300}\.py):(?P<line>\d{1,9}) (?:in )?(?P<function>[A-Za-z_]\w{0,100})(?: {1,20}->.*)?$"
)
# What may stand before every line of a log: the name of a pod, of a container, of a job.
_LABEL = re.compile(r"\s*(?:(?:\[?[a-z][a-z0-9._/:-]{1,80}\]?|\|)[ ]{1,20}){0,3}")
# What is the first of a line in a box; and what is the last of a line, and is not within a word.
BOX = "│╭╰┃"
_ENDS = "│╮╯┃\u201d\u2019"
_NARROWEST, _WIDEST = 60, 250
_USUAL_WIDTHS = frozenset({*range(60, _WIDEST + 1, 10), 72, 79, 99, 132})


class Line(NamedTuple):
    """One line of a log.

    number: the number of the line in its file.
    source: the rank or process that wrote the line; empty if it is not known.
    text: the text after the prefixes.
    raw: the whole line.
    stamped: whether one of the prefixes is only a time, which a container writes before each line and a program before
        each message.
    """

    number: int
    source: str
    text: str
    raw: str
    stamped: bool = False


@dataclass(frozen=True, slots=True)
class LogPiece:
    """A piece of a log.

    text: the whole text.
    lines: the lines as the programs wrote them.
    numbers: for each of ``lines``, the number of the file's line in which it begins.
    written: the lines of the file, in which a terminal may have broken one line into several.
    """

    text: str
    lines: Sequence[str]
    numbers: Sequence[int]
    written: Sequence[str]


class LogInput:
    """One log.

    path: the file; None for standard input.
    truncated: whether the log was read only up to MAX_STREAM bytes.
    """

    def __init__(self, path: pathlib.Path | None) -> None:
        self.path = path
        self.name = str(path) if path is not None else "standard input"
        self.truncated = False

    def read_pieces(self) -> Iterator[LogPiece]:
        """Yields the log in pieces of about a mebibyte, without colours.

        Raises UsageError for a file that cannot be read, is empty, or is not text.
        """
        number, width, words, label, rest, empty = 1, -1, 0, "", "", True
        forms = FormReader()
        for text in itertools.chain(self._decode_texts(), [""]):
            whole, rest = _split(rest + text) if text else (rest, "")
            empty = empty and not whole.strip()
            written = _break_into_lines(whole)
            undone, places = forms.undo(written, whole)
            if "[0m" in whole:
                undone = [COLOUR_ALONE.sub("", line) for line in undone]
            if width < 0 and undone:
                label = _find_common_label(undone)
                words = 0 if label else measure_words_width(undone, _begins_line)
                width = 0 if label or words else _measure_wrapped_width(undone)
            lines, begins = list(undone), list(range(len(undone)))
            if words:
                lines, begins = join_words(undone, words, _begins_line)
            elif width > 0:
                lines, begins = _join_wrapped(undone, width)
            if label:
                lines = [line.removeprefix(label) for line in lines]
            text = whole if lines == written else "\n".join(lines)
            yield LogPiece(text, lines, [number + places[at] for at in begins], written)
            number += len(written)
        if empty:
            raise UsageError(f"{self.name} is empty")

    def _decode_texts(self) -> Iterator[str]:
        """Yields the log as text, without its colours. Raises UsageError for binary data."""
        data = self._read()
        first = next(data, b"")
        if first.startswith(_GZIP):
            data = self._limit_bytes(_inflate(itertools.chain([first], data), self.name))
            first = next(data, b"")
        encoding = _detect_encoding(first)
        if encoding == "utf-8" and _is_binary(first):
            raise UsageError(f"{self.name} is not a text file")
        decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        for part in itertools.chain([first], data):
            # A log that was truncated while it was written to has holes of zeros.
            text = decoder.decode(part).replace("\0", "").replace("\r\n", "\n")
            yield ANSI.sub("", text) if "\x1b" in text else text

    def _read(self) -> Iterator[bytes]:
        is_file = self.path is not None and self.path.is_file()
        try:
            parts = read_parts(self.path, size=_CHUNK, patient=True)
            yield from parts if is_file else self._limit_bytes(_gather_blocks(parts))
        except OSError as error:
            raise UsageError(f"cannot read {self.name}: {error.strerror or error}") from None

    def _limit_bytes(self, data: Iterable[bytes]) -> Iterator[bytes]:
        read = 0
        for part in data:
            yield part
            read += len(part)
            if read >= MAX_STREAM:
                self.truncated = True
                return


def _gather_blocks(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the same bytes in larger parts: all but the last have at least the size of a read from a file."""
    block = bytearray()
    for part in parts:
        block += part
        if len(block) >= _CHUNK:
            yield bytes(block)
            block.clear()
    yield bytes(block)


def _detect_encoding(first: bytes) -> str:
    """Detects the encoding by a byte order mark, or by zeros at every second byte, which ASCII text has in UTF-16."""
    for mark, encoding in _MARKS:
        if first.startswith(mark):
            return encoding
    even, odd = first[0:4096:2].count(0), first[1:4096:2].count(0)
    half = min(len(first), 4096) // 2
    if 4 * max(even, odd) > half > 8 and max(even, odd) > 2 * min(even, odd):
        return "utf-16-le" if odd > even else "utf-16-be"
    return "utf-8"


def _inflate(data: Iterable[bytes], name: str) -> Iterator[bytes]:
    """Yields the content of a gzip file up to the end of the data. The members of the file are joined.

    Raises UsageError for data that cannot be decompressed.
    """
    inflate = zlib.decompressobj(wbits=31)
    try:
        for part in data:
            rest = part
            while rest:
                yield inflate.decompress(rest, _CHUNK)
                rest = inflate.unconsumed_tail
                if inflate.eof:
                    rest, inflate = inflate.unused_data, zlib.decompressobj(wbits=31)
    except zlib.error:
        raise UsageError(f"{name} is not a text file, and cannot be decompressed as gzip") from None


def _is_binary(data: bytes) -> bool:
    """Returns whether the data is binary, judged by its beginning.

    Data is binary if it begins like a known binary format, or if more than a tenth of it is control characters. If much
    of it is not valid UTF-8, half as many control characters suffice.
    """
    begin = data[:4096]
    control = len(begin) - len(begin.translate(None, _NOT_TEXT))
    undecodable = begin.decode("utf-8", errors="replace").count("\ufffd")
    return data.startswith(_MAGIC) or 10 * control > len(begin) or (20 * control > len(begin) < 5 * undecodable)


def _split(text: str) -> tuple[str, str]:
    """Splits a text into its whole lines and the rest. A very long text without a line end counts as a whole line."""
    end = text.rfind("\n") + 1
    if not end and len(text) > _MAX_LINE:
        end = len(text)
    return text[:end], text[end:]


def _break_into_lines(text: str) -> list[str]:
    lines = text.split("\n")
    if "\r" in text:
        # A progress bar writes its line again and again; what was written last stands.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    # After the end of the last line there is no other line.
    return lines[:-1] if lines[-1] == "" else lines


def _find_common_label(lines: Sequence[str]) -> str:
    """Finds the indentation or label that is the same before every line; empty if there is none."""
    written = [line for line in lines if line.strip()]
    if len(set(written)) < 2:
        return ""
    pairs = zip(min(written), max(written), strict=False)
    match = _LABEL.match("".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    # "rank 0" is no label with a number behind it.
    return match[0] if match and not match[0].rstrip().endswith("rank") else ""


def _measure_wrapped_width(lines: Sequence[str]) -> int:
    """Measures the width at which a terminal broke the lines of a log; 0 if the lines were not broken.

    No line is wider than this width, and most lines of this width continue in the next line. One such line is enough if
    the width is usual for a terminal or if the line ends within a path; otherwise there must be two. Lines of one form,
    such as those of a progress bar, do not count.
    """
    width = max(map(len, lines))
    if not _NARROWEST <= width <= _WIDEST:
        return 0
    full = [at for at, line in enumerate(lines) if len(line) == width]
    going_on = [at for at in full if at + 1 < len(lines) and _goes_on(lines[at], lines[at + 1])]
    is_sure = width in _USUAL_WIDTHS or any(lines[at].count('"') % 2 for at in going_on)
    return width if 2 * len(going_on) > len(full) and len(going_on) >= (1 if is_sure else 2) else 0


def _goes_on(line: str, following: str) -> bool:
    """Returns whether ``following`` may be the rest of a broken line.

    line: the part that was read so far.
    """
    if line[:1] in BOX:
        return following[:1] not in BOX and line[-1:] not in _ENDS
    if (
        _PREFIX.match(following)
        or _find_shape(line) == _find_shape(following)
        or line[-1:] in _ENDS
        or not following.strip()
    ):
        return False
    if _OF_PYTHON.match(following) or (line[-1:] in ".!?:" and SHORT_FRAME.match(following)):
        return False
    is_exception = line[:1].isspace() and _EXCEPTION.match(following)
    return _PREFIX.match(line) is not None or not (is_exception or _BEGINNING.match(following))


def _begins_line(line: str) -> bool:
    """Returns whether a line begins a new message: with a prefix, a traceback, or an exception."""
    return any(pattern.match(line) for pattern in (_PREFIX, _BEGINNING, _EXCEPTION))


def _find_shape(line: str) -> str:
    """Reduces a line to its beginning without numbers, which is the same for all lines of a progress bar."""
    return _DIGIT.sub("0", line[:6])


def _join_wrapped(lines: Sequence[str], width: int) -> tuple[list[str], list[int]]:
    """Joins the lines that a terminal broke, and returns the index at which each joined line began."""
    joined: list[str] = []
    begins: list[int] = []
    for at, line in enumerate(lines):
        before = lines[at - 1] if at else ""
        if len(before) == width and _goes_on(joined[-1], line) and len(joined[-1]) < _MAX_LINE:
            joined[-1] += line
        else:
            joined.append(line)
            begins.append(at)
    return joined, begins


def split_lines(number: int, raw: str) -> list[Line]:
    """Splits a line into the lines that were joined in it; returns an unjoined line alone."""
    raw = raw[:_MAX_LINE]
    is_joined = raw.find("[rank", 1) > 0 or "   20" in raw
    return [parse_line(number, piece) for piece in (_JOINT.split(raw) if is_joined else [raw])]


def parse_line(number: int, raw: str) -> Line:
    """Separates the text of a line from its prefixes. A line may have a time, Ray's prefix, and torchrun's prefix."""
    sources: list[str] = []
    position, stamped = 0, False
    raw = raw[:_MAX_LINE]
    while match := _PREFIX.match(raw, position):
        position = match.end()
        if match.lastgroup == "stamp":
            stamped = True
        elif match.lastgroup:
            sources.append(_name_source(match))
    source = sources[0] if sources else ""
    if len(sources) > 1:
        # torchrun's rank is more precise than the processes around it.
        rank = next((source for source in reversed(sources) if source.startswith("rank")), "")
        source = rank or " ".join(dict.fromkeys(sources))
    return Line(number, source, raw[position:], raw, stamped)


def _name_source(match: re.Match[str]) -> str:
    if match["rank"] is not None:
        return f"rank {int(match['rank'])}"
    if match["task"] is not None:
        return f"task {int(match['task'])}"
    if match["local"] is not None:
        return f"local rank {match['local']}"
    return f"pid {match['pid']}" + (f" on {match['ip']}" if match["ip"] else "")


def has_clock(raw: str) -> bool:
    """Returns whether a time of day stands near the beginning of the line."""
    return raw.count(":", 0, _CLOCK_END) > 1 and _CLOCK.search(raw, 0, _CLOCK_END) is not None


def parse_time(raw: str) -> float | None:
    """Returns the first time stamp in the line, in seconds on an arbitrary but common scale; None if there is none."""
    if not has_clock(raw):
        return None
    if match := _STAMP.search(raw):
        return _convert_to_seconds(*match.groups())
    if match := _GLOG.search(raw):
        return _convert_to_seconds(str(datetime.now().year), *match.groups())
    return None


def _convert_to_seconds(year: str, month: str, day: str, *clock: str | None) -> float | None:
    hour, minute, second, fraction = clock
    try:
        whole = datetime(int(year), int(month), int(day), int(hour or 0), int(minute or 0), int(second or 0))
        return whole.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except (ValueError, OverflowError, OSError):
        return None
