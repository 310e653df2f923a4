"""Restores the lines of a log that was exported or pasted as JSON, as HTML, with line numbers, or wrapped."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

# What one line of the file becomes.
_Undo: TypeAlias = Callable[[str], list[str]]

_COLOUR = r"\[\d{0,2}(?:;\d{1,3}){0,8}m"
ANSI = re.compile(rf"\x1b\[[0-9;?]{{0,32}}[ -/]{{0,8}}[@-~]|\x1b\][^\x07\x1b]{{0,512}}(?:\x07|\x1b\\)|{_COLOUR}")
# The escape character is often lost where a log was pasted, or written as two, and what followed it stays.
COLOUR_ALONE = re.compile(rf"(?:\^\[)?{_COLOUR}")

# Keys whose text is a line of the log whatever it is; those of a time, of a rank; and those that repeat another.
_MESSAGE_KEYS = frozenset({"message", "msg", "log", "text", "line", "event", "body", "textPayload", "@message"})
_TIME_KEYS = frozenset({"time", "timestamp", "ts", "@timestamp", "asctime"})
_RANK_KEYS = frozenset({"rank", "global_rank", "RANK"})
_REPEATING_KEYS = frozenset({"ename", "evalue", "exc_value"})
_ISO_TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
_JSON_STRING = re.compile(r'\s*(?:"(?P<key>[\w@.]{1,60})"\s*:\s*)?(?P<string>"(?:[^"\\]|\\.)*")\s*,?\s*$')
_DOCUMENT = re.compile(r'\s*[\[{]\s*["\[{]')
# A line of a JSON document that has no text.
_STRUCTURE = re.compile(
    r'\s*(?:"[\w@.]{1,60}"\s*:\s*)?(?:[\[\]{}]{1,2}|-?[\d.]{1,30}|null|true|false)\s*,?\s*$', re.ASCII
)
# A traceback within a text, whose line ends are written as escapes.
_ESCAPED = re.compile(r'last\):(?P<end>\\+n)|(?P<other>\\+n)\s{0,8}File \\{0,9}["\']')
_ESCAPES = ((re.compile(r"\\+n"), "\n"), (re.compile(r"\\+t"), "\t"), (re.compile(r"\\+(?:u001[bB]|x1[bB])"), "\x1b"))
_ESCAPED_QUOTE = re.compile(r"\\+([\"'/])")
# An editor makes the left ones of plain ones.
_PLAIN_QUOTES = str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")
# pystack marks the frames of Python among those of C.
_OF_STACK = re.compile(r"^(\s{0,40})\(Python\) (?=File )")
_RANK_BEFORE = re.compile(r"""\[rank(\d{1,9})\]:|["']?\brank["']?\s?[:=]\s?["']?(\d{1,9})""")

_TAG = re.compile(
    r"</?(?:a|b|body|br|code|div|em|font|head|html|i|meta|p|pre|samp|span|strong|title|tt)"
    r"(?:\s[^<>]{0,500})?/?>",
    re.IGNORECASE,
)
_LINE_END_TAG = re.compile(r"<br\s{0,4}/?>|</(?:p|div|pre|body)>", re.IGNORECASE)

_NUMBERED = re.compile(r"[ \t]{0,12}(?P<number>\d{1,9})(?P<rest>(?:[:|.)\t \u2192].*)?)$")
_SEPARATORS = " \t:|.)\u2192"
_FEWEST_NUMBERED = 2

# A frame that goes on in the next line.
_INCOMPLETE = re.compile(r'(?:^|\s)File(?: "[^"]*(?:"(?:,(?: line(?: \d+,(?: in)?)?)?)?)?)?\s?$')
_IN_PATH = re.compile(r'File "[^"]*$')
# The sides of a box, whose lines are broken within it.
_BOX_SIDES = "│┃╮╯"
_NARROWEST, _WIDEST, _LONGEST_WORD = 60, 132, 24


class FormReader:
    """Restores the lines of one file. Call ``undo`` with the lines of each piece in order.

    The first piece shows how the file's lines begin.
    """

    def __init__(self) -> None:
        self._separator: str | None = None
        self._is_html = False
        self._is_document: bool | None = None

    def undo(self, lines: Sequence[str], whole: str) -> tuple[Sequence[str], Sequence[int]]:
        """Returns the lines as the programs wrote them and, for each, the index of the given line in which it began.

        whole: all the given lines as one text.
        """
        begins: Sequence[int] = range(len(lines))
        if self._separator is None and lines:
            self._separator = _find_separator(lines)
        steps: list[_Undo] = []
        if self._separator:
            steps.append(self._strip_number)
        self._is_html = self._is_html or (("</" in whole or "<br" in whole.lower()) and _TAG.search(whole) is not None)
        if self._is_document is None and lines:
            self._is_document = _DOCUMENT.match(whole) is not None
        if self._is_document:
            steps.append(lambda line: [""] if _STRUCTURE.match(line) else [line])
        if '{"' in whole or "\\n" in whole or whole.lstrip()[:1] in ('"', "{", "["):
            steps.append(_undo_json)
        if self._is_html:
            steps.append(_undo_html)
        if "File \u201c" in whole:
            steps.append(lambda line: [line.translate(_PLAIN_QUOTES) if "File \u201c" in line else line])
        if "(Python) File" in whole:
            steps.append(lambda line: [_OF_STACK.sub(r"\1", line)])
        for step in steps:
            pairs = [(text, at) for line, at in zip(lines, begins, strict=True) for text in step(line)]
            lines, begins = [text for text, _ in pairs], [at for _, at in pairs]
        return lines, begins

    def _strip_number(self, line: str) -> list[str]:
        match = _NUMBERED.match(line)
        return [match["rest"].removeprefix(self._separator or "") if match else line]


def _find_separator(lines: Sequence[str]) -> str:
    """Finds the separator between a viewer's line numbers and the lines; empty if the lines are not numbered."""
    # A code block's fences, of a report in Markdown, have no number.
    written = [line for line in lines[:400] if line.strip() and not line.lstrip().startswith("```")]
    matches = [match for line in written if (match := _NUMBERED.match(line))]
    if len(matches) < _FEWEST_NUMBERED or len(matches) < len(written):
        return ""
    numbers = [int(match["number"]) for match in matches]
    if any(not 0 < after - before <= 4 for before, after in itertools.pairwise(numbers)):
        return ""
    rests = [match["rest"] for match in matches if match["rest"]]
    if not rests:
        return ""
    common = "".join(
        a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(min(rests), max(rests), strict=False))
    )
    return common[: len(common) - len(common.lstrip(_SEPARATORS))]


def _undo_html(line: str) -> list[str]:
    texts = _LINE_END_TAG.sub("\n", line).split("\n")
    if len(texts) > 1 and not texts[-1].strip():
        texts.pop()
    return [html.unescape(_TAG.sub("", text)).replace("\xa0", " ") for text in texts]


def _undo_json(line: str) -> list[str]:
    text = line.strip()
    if text.startswith('{"') and text.rstrip(",").endswith("}"):
        try:
            value = json.loads(text.rstrip(","))
        except ValueError:
            return _undo_escapes(line)
        return _list_texts(value) or [line]
    if match := _JSON_STRING.match(line):
        if match["key"] in _REPEATING_KEYS:
            return []
        try:
            texts = _break_text(json.loads(match["string"], strict=False))
        except ValueError:
            return _undo_escapes(line)
        return [part for text in texts for part in _undo_escapes(text)]
    return _undo_escapes(line)


def _list_texts(value: dict[str, Any]) -> list[str]:
    """Lists the lines in the texts of a JSON object, each preceded by the object's rank and time."""
    rank = next((value[key] for key in _RANK_KEYS if str(value.get(key, "")).isdecimal()), None)
    time = next((str(value[key]) for key in _TIME_KEYS if _ISO_TIME.match(str(value.get(key, "")))), "")
    before = (f"{time} " if time else "") + (f"[rank{rank}]: " if rank is not None else "")
    return [before + line for text in _walk(value) for line in text]


def _walk(value: Any, key: str = "") -> Iterator[list[str]]:
    if isinstance(value, str):
        if value.lstrip().startswith('{"'):
            yield _undo_json(value)
        elif key in _MESSAGE_KEYS or (key not in _REPEATING_KEYS | _TIME_KEYS and (" " in value or "\n" in value)):
            yield [part for line in _break_text(value) for part in _undo_escapes(line)]
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item, key)


def _break_text(text: str) -> list[str]:
    return ANSI.sub("", text).removesuffix("\n").split("\n")


def _undo_escapes(line: str) -> list[str]:
    """Splits a line that contains a whole traceback with escaped line ends; any other line is returned alone."""
    if "\\n" not in line or (match := _ESCAPED.search(line)) is None:
        return [line]
    end = match["end"] or match["other"]
    level, start = end.count("\\"), match.start("end" if match["end"] else "other")
    quotes = [quote for quote in re.finditer(r"(\\*)[\"']", line[:start]) if len(quote[1]) < level]
    begin, stop, head = 0, len(line), ""
    if quotes:
        begin, quote = quotes[-1].end(), quotes[-1][0][-1]
        closing = (m for m in re.finditer(rf"(\\*){quote}", line[start:]) if len(m[1]) < level)
        stop = next((start + m.start() for m in closing), len(line))
        head = line[: quotes[-1].start()]
    text = line[begin:stop]
    for escape, character in _ESCAPES:
        text = escape.sub(character, text)
    rank = _RANK_BEFORE.search(head)
    before = f"[rank{rank[1] or rank[2]}]: " if rank else ""
    return [head, *(before + part for part in _break_text(_ESCAPED_QUOTE.sub(r"\1", text)))]


def measure_words_width(lines: Sequence[str], begins_line: Callable[[str], object]) -> int:
    """Measures the width at which lines were broken between words; 0 if the lines were not broken.

    begins_line: a function that tells whether a line begins a message, and so does not continue the line before it.
    """
    width = max(map(len, lines), default=0)
    if not _NARROWEST <= width <= _WIDEST:
        return 0
    pairs = [
        (line, following) for line, following in itertools.pairwise(lines) if len(line) < width and following.strip()
    ]
    frames = sum(_INCOMPLETE.search(line) is not None for line, _ in pairs)
    if not frames and any(side in line for line in lines for side in _BOX_SIDES):
        return 0
    broken = [line for line, following in pairs if _is_broken(line, following, width) and not begins_line(following)]
    words = max(frames, sum(len(line) > width - _LONGEST_WORD for line in broken))
    # A terminal breaks every line at the same width.
    return width if 2 * words > sum(len(line) == width for line in lines) else 0


def join_words(lines: Sequence[str], width: int, begins_line: Callable[[str], object]) -> tuple[list[str], list[int]]:
    """Joins the lines that were broken between words, and returns the index at which each joined line began."""
    joined: list[str] = []
    begins: list[int] = []
    for at, line in enumerate(lines):
        before = lines[at - 1] if at else ""
        in_frame = bool(joined) and _INCOMPLETE.search(joined[-1]) is not None
        goes_on = _is_broken(before, line, width) and (in_frame or not begins_line(line))
        if not (goes_on or (in_frame and line.strip() and not begins_line(line))):
            joined.append(line)
            begins.append(at)
            continue
        in_path = in_frame and _IN_PATH.search(joined[-1]) is not None
        is_within = before.rstrip().endswith("-") or (in_path and not before.endswith(" "))
        joined[-1] = joined[-1].rstrip() + ("" if is_within else " ") + line.lstrip()
    return joined, begins


def _is_broken(line: str, following: str, width: int) -> bool:
    """Returns whether ``line`` was broken at ``width``: the first word of the following line had no room in it."""
    before, word = line.rstrip(), following.split(maxsplit=1)[:1]
    if not before or not word or following[:1].isspace():
        return False
    return len(before) + len(word[0]) + (not before.endswith("-")) > width
