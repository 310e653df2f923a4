"""Reads descriptions by people of a failure without an exception: the symptom, the event before, the circumstances."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fsdp_doctor.explain.circumstances import find_causes, join_causes
from fsdp_doctor.explain.log_input import LogPiece
from fsdp_doctor.explain.mechanisms import Reading
from fsdp_doctor.explain.tables import compile_pattern, read_table, shows_any

# Limit for the prose that is read of a log, in characters, and the least number of words in a line of prose.
_MAX_CHARACTERS = 16_384
_MIN_WORDS = 4
# Greatest number of causes in a sentence that come from circumstances.
_MAX_NAMED = 3
# Beginning of a line that is not prose: a log record, a frame, code, a table, a setting.
_NOT_PROSE = re.compile(
    r"\s*(?:\d{2,4}[-/:]\d|\[|\(|\{|\}|<|\||`{3}|File \"|Traceback|at 0x|#\d|import |from \w+ import|def |class "
    r"|return\b|raise |assert |\$ |(?:DEBUG|INFO|WARN\w*|ERROR|CRITICAL|FATAL)\b|[\w.\"'-]{1,60}\s?[:=]\s?[\[{\"'\d-]"
    r"|\w+(?:\.\w+)*(?:Error|Exception|Warning|Exit|Interrupt)\b|[\w./-]+:\d+|\w+=\S+(?:\s*$|\s+\S+=)|\S+\()"
)
_RECORD = re.compile(
    r"(?:^|[\s\[(|-])(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[\])\s:|-]|\bpid=\d|\d{2}:\d{2}:\d{2}|\bFile \"|\d+%\|"
    r"|\w(?:Error|Exception|Warning): "
)
_INDENTED = re.compile(r"(?: {4,}|\t)\S")
# A mark of Markdown, and the tags of an issue's title.
_MARK = re.compile(
    r"^\s{0,3}(?:>\s?|[-*+]\s|#{1,6}\s|\d{1,2}[.)]\s)*"
    r"(?:\[(?!(?i:rank|info|warn|error|debug|default|pod|std|pid|global))[A-Za-z][\w .+-]{0,30}\]:?\s*)*"
)
# What should be, and not what is.
_WISH = re.compile(r"(?i)\b(?:should|expect(?:ed|ing)?|would like|feature request|please add)\b")
_WORD = re.compile(r"(?<![\w./=_-])[A-Za-z][a-z'-]*(?![\w/=_(\[])")
_FUNCTION_WORDS = re.compile(
    r"(?i)\b(?:the|a|an|is|are|was|were|has|have|with|when|after|before|not|no|but|and|to|of|in|on|it|i|we|my|our|does"
    r"|do|did|as|than|each|every|only|if|for)\b"
)
_SENTENCE = re.compile(r"(?<=[.!?])[\"')]?\s+(?=[\"'(`A-Z0-9])|\n")
# Without one of these words a text is not about sharded training, a checkpoint or an engine.
_ABOUT = re.compile(
    r"(?i)fsdp|fully[_ ]?shard|dtensor|\bshard\w*|\bdcp\b|\branks?\b|\bgpus\b|\bcheckpoints?\b|state[_ ]dict|\bZeRO\b"
    r"|\bHSDP\b|deepspeed|megatron|\bv-?llm\b|sglang|rollouts?|\blora\b|adapter|accelerate|torchtitan|torchtune"
    r"|\bresum\w+|distributed|re-?shard|un-?shard|all-?gather|collectives?\b|offload|\bmerged? (?:the )?model"
    r"|\bmerging\b|lightning|\bengines?\b|update_weights|sync\w* (?:the )?weights|multi[- ](?:gpu|node)|optimi[sz]er"
    r"|(?:two|four|eight|several|\d+) (?:gpus|nodes|processes)"
)
# Up to 60 characters of the same sentence; a full stop within a name does not end it.
_GAP = r"(?:[^.;!?\n]|\.(?=\S)){0,60}?"
_WORDS = re.compile(r"<(\w+)>")
_FAR = 1_000
# Two figures of which one may be a number of ranks times the other.
_FIGURE = "<loss>"
_DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)")
_MAX_FIGURES = 8
_EXACTLY = 0.02
_COUNT = re.compile(
    r"(?i)(?<![\w.])(?P<before>\d{1,4}) ?x? ?(?:\w+ )?(?:ranks|gpus|devices|processes|workers|nodes|micro-?batches)\b"
    r"|\b(?:TP|CP|EP|DP|PP|SP|world[_ ]size|dp_\w+|nproc\w*)(?: size)? ?(?:=|of|is)? ?(?P<after>\d{1,4})\b"
)
_STRONG = r"\b(?:after|when|while|during|once|upon|on|at|following|since|before|by|in|each|every)\b[^.;,!?\n]{0,25}?"


class JobEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that a job does. ``prose.toml`` explains the fields."""

    name: str
    phrase: str
    shown: tuple[str, ...]
    minor: bool = False


class Observation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that people see a job do. ``prose.toml`` explains the fields."""

    name: str
    clash: str
    shown: tuple[str, ...]
    causes: Mapping[str, tuple[str, ...]]
    decide: str
    subjects: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    needs_event: bool = False
    unless: tuple[str, ...] = ()
    open: bool = False
    decide_after: Mapping[str, str] = {}


class _Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    words: dict[str, str]
    event: tuple[JobEvent, ...]
    observation: tuple[Observation, ...]


@dataclass(frozen=True)
class _Sentence:
    text: str
    line: int


class ProseReader:
    """Keeps the prose of a log. Call ``read`` with each piece of a file in order, then ``end``."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._lines: list[tuple[int, str]] = []
        self._kept = 0

    def read(self, piece: LogPiece) -> None:
        if self._kept >= _MAX_CHARACTERS:
            return
        for number, raw in zip(piece.numbers, piece.lines, strict=True):
            if is_prose(raw):
                self._lines.append((number, raw))
                self._kept += len(raw)
                if self._kept >= _MAX_CHARACTERS:
                    return

    @property
    def text(self) -> str:
        """The prose, one line after the other."""
        return "\n".join(line for _, line in self._lines)

    def end(self) -> Reading | None:
        """Returns the symptom that the prose describes; None if it describes no symptom of sharded training."""
        text = self.text
        if not text or _ABOUT.search(text) is None:
            return None
        sentences = list(_split(self._lines))
        if found := self._find_factor(sentences, text):
            return found
        for is_wish in (False, True):
            meant = [at for at, sentence in enumerate(sentences) if bool(_WISH.search(sentence.text)) == is_wish]
            if found := self._find_observation(sentences, meant, text):
                return found
        return None

    def _find_factor(self, sentences: Sequence[_Sentence], text: str) -> Reading | None:
        """Reads a loss or norm that a sentence gives twice, if one figure is a number of ranks times the other."""
        counts = _list_counts(text)
        observation = next(each for each in _read_tables().observation if each.name == "factor")
        for sentence in sentences:
            if not counts or not _shows((_FIGURE,), sentence.text):
                continue
            figures = sorted({float(number) for number in _DECIMAL.findall(sentence.text)} - {0.0})
            for small, large in itertools.combinations(figures[:_MAX_FIGURES], 2):
                times = round(large / small)
                if times in counts and abs(large / small - times) < _EXACTLY * times:
                    told = f"one figure is {times} times the other ({large:g} and {small:g}): {counts[times]}"
                    return self._make_reading(observation, None, sentence, text, told)
        return None

    def _find_observation(self, sentences: Sequence[_Sentence], meant: Sequence[int], text: str) -> Reading | None:
        """Returns the reading of the first observation that a sentence shows, or None.

        meant: the indices of the sentences to search.
        """
        for observation in _read_tables().observation:
            for at in meant:
                if not _shows(observation.shown, sentences[at].text) or _shows(observation.unless, sentences[at].text):
                    continue
                event = _find_event(sentences, at, observation.events)
                if event is None and observation.needs_event:
                    continue
                return self._make_reading(observation, event, sentences[at], text)
        return None

    def _make_reading(
        self, observation: Observation, event: JobEvent | None, sentence: _Sentence, text: str, told: str = ""
    ) -> Reading:
        """Writes the possible causes of an observation, and the command that decides.

        told: a contradiction to write instead of the observation's own; empty for the observation's own.
        """
        name = event.name if event is not None else ""
        names, causes = find_causes(
            text, [name if subject == "event" else subject for subject in observation.subjects or (observation.name,)]
        )
        causes = [*causes[:_MAX_NAMED], *observation.causes.get(name, ()), *observation.causes.get("any", ())]
        clash = told or (f"after {event.phrase}, {observation.clash}" if event is not None else observation.clash)
        named = f" (the text names: {', '.join(names)})" if names else ""
        decide = observation.decide_after.get(name, observation.decide)
        place = f"{self._file}, line {sentence.line}"
        decide = f"{join_causes(causes)} {decide}".strip()
        return Reading(clash=f"{clash}{named}", decide=decide, lines=(place,), vague=observation.open)


def is_prose(raw: str) -> bool:
    """Returns whether a line is a sentence, and not a record of a log, a frame, code or a table."""
    if raw.count(" ") < _MIN_WORDS - 1 or _INDENTED.match(raw):
        return False
    line = _MARK.sub("", raw, count=1)[:600]
    if _NOT_PROSE.match(line) or _RECORD.search(line):
        return False
    words = _WORD.findall(line)
    return len(words) >= _MIN_WORDS and 2 * len(words) >= len(line.split()) and bool(_FUNCTION_WORDS.search(line))


def _list_counts(text: str) -> dict[int, str]:
    """Maps possible numbers of ranks to where they come from: numbers in the text, and quotients of these numbers.

    A quotient may be the size of a dimension of the mesh.
    """
    named = {int(match["before"] or match["after"]) for match in _COUNT.finditer(text)} - {0, 1}
    counts = dict.fromkeys(named, "the text names this number of ranks or micro-batches")
    for large, small in itertools.permutations(sorted(named), 2):
        if large % small == 0 and large // small > 1:
            counts.setdefault(large // small, f"{large} divided by {small}, of the text's ranks")
    return counts


@functools.cache
def _read_tables() -> _Tables:
    table = read_table("prose.toml")
    return msgspec.convert(table, _Tables)


@functools.cache
def _expand(pattern: str) -> str:
    """Writes the words and gaps of a pattern as regular expressions."""
    words = _read_tables().words
    expanded = pattern
    while _WORDS.search(expanded):
        expanded = _WORDS.sub(lambda match: rf"\b{words[match[1]]}(?!\w)", expanded)
    return expanded.replace("~", _GAP)


def _shows(patterns: Sequence[str], text: str) -> bool:
    return shows_any(map(_expand, patterns), text)


def _split(lines: Sequence[tuple[int, str]]) -> Iterator[_Sentence]:
    """Yields the sentences of the prose. A sentence that goes on in the next line is yielded as one sentence."""
    joined: list[str] = []
    begin = last = 0
    for number, raw in lines:
        line = _MARK.sub("", raw, count=1).strip()
        is_heading = raw.lstrip().startswith("#")
        if joined and (number != last + 1 or is_heading):
            yield from _split_joined(joined, begin)
            joined = []
        begin = begin if joined else number
        last = number
        joined.append(line)
        if line.endswith((".", "!", "?", ":")) or is_heading:
            yield from _split_joined(joined, begin)
            joined = []
    yield from _split_joined(joined, begin)


def _split_joined(lines: Sequence[str], begin: int) -> Iterator[_Sentence]:
    return (_Sentence(text, begin) for text in _SENTENCE.split(" ".join(lines)) if text)


def _find_event(sentences: Sequence[_Sentence], at: int, allowed: Sequence[str]) -> JobEvent | None:
    """Finds the event after which something was seen: first in the sentence ``at`` itself, then in the other sentences.

    A phrase such as "after a resume" counts more than the word "resume" alone, and most if its words are close.
    """
    events = [event for event in _read_tables().event if event.name in allowed]
    near = [*sentences[:at][::-1], *sentences[at + 1 :]]
    for group in ([sentences[at]], near):
        for is_minor in (False, True):
            if found := _find_nearest([event for event in events if event.minor == is_minor], group):
                return found
    return None


def _find_nearest(events: Sequence[JobEvent], sentences: Sequence[_Sentence]) -> JobEvent | None:
    """Finds the event whose words follow most closely behind a word such as "after".

    If no event's words follow such a word, finds the first event whose words are in the sentences at all.
    """
    gaps = [min((_measure_gap(event, sentence.text) for sentence in sentences), default=_FAR) for event in events]
    if min(gaps, default=_FAR) < _FAR:
        return events[gaps.index(min(gaps))]
    texts = [sentence.text for sentence in sentences]
    return next((event for event in events if any(_shows(event.shown, text) for text in texts)), None)


def _measure_gap(event: JobEvent, text: str) -> int:
    """Measures how far the words for an event stand behind a word such as "after"; ``_FAR`` if nowhere behind it."""
    patterns = (compile_pattern(f"{_STRONG}(?P<event>{_expand(pattern)})") for pattern in event.shown)
    matches = (match for pattern in patterns for match in pattern.finditer(text))
    return min((match.start("event") - match.start() for match in matches), default=_FAR)
