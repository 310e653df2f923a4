"""Reads the text around a failure: the sentences that say where the job does not fail, and the settings."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from fsdp_doctor.explain.log_input import LogPiece
from fsdp_doctor.explain.places import find_function, shorten
from fsdp_doctor.explain.tables import compile_pattern, read_table

# Limits of the text that is kept, and of one line, in characters.
_MAX_CHARACTERS = 16_384
_MAX_LINE = 500
# Number of lines that are searched for text. People write at the beginning of a log, or the log is short.
_MAX_LINES = 4_000
# Limit for the number of settings, because a log may print its whole configuration.
_MAX_SETTINGS = 400
_SHORTEST_WORD = 4
# Lines that a program wrote, not a person: frames, records, boxes, prefixes of ranks, and code in a traceback.
_OF_PROGRAM = re.compile(
    r"File \"|Traceback|^\s*[│╭╰❱>]|^E\s|^\s*[\^~]+\s*$|^\s*\[(?:default\d|rank\d|\d)|^\s*\(\w[^)]*pid=|^ {4,}\S|^\t"
    r"|(?:^|[\s\[(|-])(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[\])\s:|-]|^[IWEF]\d{4} |\d+%\|"
    r"|^\s*[\w.]*(?:Error|Exception|Warning|Interrupt)\b: ?"
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=\S)|\n|;\s|\s--?>\s")
_SETTING = re.compile(
    r"(?:^|[\s,({`'\"-])(?P<flag>--)?(?P<name>[A-Za-z][\w.-]{2,60}?)['\"`]?(?:\s?[=:]\s?|(?(flag)\s|(?!)))"
    r"['\"`]?(?P<value>[\w./:+-]{1,60})"
)
_FLAG = re.compile(r"(?:^|[\s`'\"])--(?P<name>[A-Za-z][\w-]{2,60})")
_OFF = frozenset({"false", "none", "null", "0", "no", "off", "disable", "disabled", "", "-1", "0.0"})
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


# Paths of a checkpoint's directory, which has the number of a step in its name, and of a configuration's file.
_DIRECTORY = re.compile(
    r"(?<![\w./~-])(?:[~.]{0,2}/|(?:[\w.-]+/)*)(?:[\w.-]+/)*"
    r"(?:checkpoint[-_]?\d+|global_step_?\d+|step[-_]?\d+|iter_\d+|epoch[-_]\d+)(?![\w-])"
)
_CONFIG = re.compile(r"(?<![\w./~-])[\w./~-]{1,200}\.ya?ml\b")
_PLACEHOLDER_OF_DIRECTORY = re.compile(r"(checkpoint verify) DIR(?:ECTORY)?\b")


class _Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    common: str
    fine: tuple[str, ...]
    unless: tuple[str, ...]


@dataclass(frozen=True)
class Around:
    """Text and settings in the log around a failure.

    text: the lines that people wrote, joined by newlines.
    contrasts: the sentences that say under which condition the job does not fail.
    settings: (name, value) of each setting in the text or the log that is not off.
    """

    text: str = ""
    contrasts: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()

    def find_setting(self, frames: Sequence[str], code: Sequence[str]) -> tuple[str, str] | None:
        """Finds a setting that shares a word with a name in the code that failed. Returns (setting, name), or None.

        Such a setting probably chooses this code: without the setting the job would run other code.
        """
        names = [name for frame in reversed(frames) if (name := find_function(frame))]
        names += [name for line in code for name in re.findall(r"[A-Za-z_]\w{3,}", line)]
        for name in names:
            words = _split_words(name)
            for setting, value in self.settings:
                if words and _share(_split_words(f"{setting} {value if not value.isdecimal() else ''}"), words):
                    return f"{setting}={value}" if value else setting, name
        return None


class AroundReader:
    """Keeps the text around the failures of a log. Call ``read`` with each piece of a file in order, then ``end``."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._kept = 0
        self._seen = 0

    def read(self, piece: LogPiece) -> None:
        for raw in piece.lines:
            self._seen += 1
            if self._kept >= _MAX_CHARACTERS or self._seen > _MAX_LINES:
                return
            if not raw.strip() or len(raw) > _MAX_LINE or _OF_PROGRAM.search(raw):
                continue
            self._lines.append(raw.strip())
            self._kept += len(raw)

    def end(self) -> Around:
        text = "\n".join(self._lines)
        return Around(text, tuple(find_contrasts(text)), tuple(_find_settings(text)))


@functools.cache
def _read_tables() -> _Tables:
    return msgspec.convert(read_table("around.toml"), _Tables)


def find_contrasts(text: str) -> Iterator[str]:
    """Yields the sentences that say where the job does not fail."""
    tables = _read_tables()
    fine = [compile_pattern(pattern) for pattern in tables.fine]
    unless = [compile_pattern(pattern) for pattern in tables.unless]
    for sentence in _SENTENCE.split(text):
        said = sentence.strip(" `*#->|")
        if not 8 <= len(said) <= 240:
            continue
        if any(pattern.search(said) for pattern in fine) and not any(pattern.search(said) for pattern in unless):
            yield shorten(said)


def _find_settings(text: str) -> Iterator[tuple[str, str]]:
    found: dict[str, str] = {}
    for line in text.split("\n"):
        for match in _FLAG.finditer(line):
            found.setdefault(match["name"], "")
        for match in _SETTING.finditer(line):
            # A word without an underscore is a setting only as a flag: "loss: 1.2" is not a setting.
            is_named = match["flag"] or "_" in match["name"]
            if is_named and (match["name"] not in found or not found[match["name"]]):
                found[match["name"]] = match["value"].rstrip(".,:")
        if len(found) > _MAX_SETTINGS:
            break
    return iter((name, value) for name, value in found.items() if value.lower() not in _OFF or not value)


@functools.lru_cache(maxsize=2048)
def _split_words(name: str) -> frozenset[str]:
    words = {word.lower() for word in _WORD.findall(name) if len(word) >= _SHORTEST_WORD}
    return frozenset(words.difference(_read_tables().common.split()))


def _share(setting: frozenset[str], name: frozenset[str]) -> bool:
    """Returns whether the words of a setting and the words of a name in the code have one in common."""
    return any(one == other or (len(one) > 5 and other.startswith(one)) for one in setting for other in name)


def fill_arguments(decide: str, text: str) -> str:
    """Replaces DIR and CONFIG in commands with paths from the text, each if the text names exactly one such path."""
    directories, configs = set(_DIRECTORY.findall(text)), set(_CONFIG.findall(text))
    if len(directories) == 1:
        decide = _PLACEHOLDER_OF_DIRECTORY.sub(lambda match: f"{match[1]} {next(iter(directories))}", decide)
    if len(configs) == 1:
        decide = decide.replace("fsdp-doctor check CONFIG", f"fsdp-doctor check {next(iter(configs))}")
    return decide
