"""Grades how certainly an entry of the catalogue is the failure in a log."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.known.catalogue import read_catalogue
from fsdp_doctor.known.clues import CLUES, ClueName
from fsdp_doctor.known.failures import KnownFailure

Grade: TypeAlias = Literal["known", "likely", "possible"]
# The package of a frame, or nothing: torch's own frames, and those of scripts, may be innermost in any failure.
_PACKAGE = re.compile(r"(?:site|dist)-packages[/\\](?!torch[/\\])([\w.-]+)")
# Libraries with a sharding of their own, whose messages are like torch's.
_OTHER_SHARDING = re.compile(r"/(fairscale|deepspeed|torch_xla)/")
# Every program runs out of memory.
_OF_ANY_PROGRAM = re.compile(r"(?i)out of memory|OutOfMemory")
# A signature that says no more than the type of the exception.
_TYPE_ALONE = re.compile(r"\w+(?:: ?|:\?\$)")
_SIZE = re.compile(r"torch\.Size\(\[(\d+, [\d, ]+)\]\)")
_CALLED = re.compile(r"([A-Za-z_]\w*)\(")
ASK_FOR_PLACE = "where was the exception raised? The log has no traceback for it"
_ORDER: tuple[Grade, ...] = ("known", "likely", "possible")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence of one failure in a log.

    message: the exception as ``Type: message``.
    traceback: the frames, the innermost in the last line.
    script: the file outside torch and Python whose own line raised the exception; empty if no such file is known.
    code: the line of code that raised the exception; empty if the log does not show it or it is only a ``raise``.
    ranks: the number of ranks that raised the exception, as far as the log names them.
    indirect: whether the message was quoted elsewhere, as in prose, and not raised where it stands.
    log: the facts that the whole log shows.
    torch: the version of torch that the log names; empty if it names none.
    """

    message: str
    traceback: str = ""
    script: str = ""
    code: str = ""
    ranks: int = 0
    indirect: bool = False
    log: Collection[ClueName] = ()
    torch: str = ""

    def shows(self, name: ClueName) -> bool:
        """Returns whether the log shows a fact: anywhere, or in the failure's message or traceback."""
        text = _SIZE.sub(_count_elements, f"{self.message}\n{self.places}")
        return name in self.log or CLUES[name].shown.search(text) is not None

    @property
    def places(self) -> str:
        """The traceback, the line of code, and each call in that line written as a frame.

        A function in C++ has no Python frame, and shows only as such a call.
        """
        called = [f"in {name}" for name in _CALLED.findall(self.code)]
        return "\n".join(filter(None, (self.traceback, self.code, *called)))

    @property
    def names_fsdp(self) -> bool:
        """Returns whether the message itself names FSDP, so that no other program can have raised it."""
        return CLUES["fsdp"].shown.search(self.message) is not None


@dataclass(frozen=True)
class Match:
    """An entry with a signature in the message of a failure, and how certain the entry is.

    open: the questions whose answers would make the entry certain.
    against: sentences on what speaks against the entry.
    """

    entry: KnownFailure
    grade: Grade
    open: tuple[str, ...] = ()
    against: tuple[str, ...] = ()


def match_evidence(evidence: Evidence) -> list[Match]:
    """Returns the entries that the failure may be, the surest first. Entries that the evidence rules out are left out.

    Of entries graded ``known``, entries with frames come first. Otherwise, entries that the matrix reproduces come
    before entries that were only reported.
    """
    entries = [entry for entry in read_catalogue() if entry.matches_message(evidence.message)]
    graded = (_grade(entry, evidence, is_shared=len(entries) > 1) for entry in entries)
    return sorted((match for match in graded if match is not None), key=_make_key)


def _count_elements(size: re.Match[str]) -> str:
    return f"{size[0]} of {math.prod(int(length) for length in size[1].split(',') if length.strip())} elements"


def _make_key(match: Match) -> tuple[int, bool, bool]:
    is_vague = match.grade == "known" and not match.entry.frames
    return _ORDER.index(match.grade), is_vague, not match.entry.reproduced


def _grade(entry: KnownFailure, evidence: Evidence, *, is_shared: bool) -> Match | None:
    """Grades one entry; returns None if the evidence rules it out.

    The grade ``known`` needs the entry's message, a frame that belongs to the failure, every fact in ``needs``, and
    nothing that speaks against the entry.

    is_shared: whether other entries have the same message.
    """
    traceback, places = evidence.traceback, evidence.places
    if entry.is_excluded_by(f"{evidence.message}\n{traceback}"):
        return None
    lacking = [name for name in entry.needs if not evidence.shows(name)]
    has_frame = entry.has_frame(places)
    # A clue without hints is shown only by the failure itself.
    is_elsewhere = not has_frame or any(not CLUES[name].hints for name in lacking)
    # A message that many programs raise, in a traceback that goes elsewhere, is another failure.
    if traceback and is_elsewhere and (entry.frames or not evidence.shows("fsdp")) and not evidence.names_fsdp:
        return None
    signatures = [each.pattern for each in entry.signatures if each.search(evidence.message)]
    is_type_alone = bool(signatures) and all(map(_TYPE_ALONE.fullmatch, signatures))
    if not has_frame and is_type_alone and (traceback or not evidence.shows("fsdp")):
        return None
    if not traceback and not evidence.shows("fsdp") and _OF_ANY_PROGRAM.search(evidence.message):
        return None
    questions = [CLUES[name].ask for name in lacking]
    if not has_frame:
        place = entry.place or "FSDP, a DTensor or a state dict"
        questions.insert(0, f"does the traceback go through {place}?")
    if evidence.indirect:
        questions.append(ASK_FOR_PLACE)
    against = tuple(_list_contradictions(entry, evidence))
    grade: Grade = "possible"
    if has_frame and not lacking and not evidence.indirect:
        grade = "known"
    elif not is_elsewhere or not (traceback or lacking or (entry.frames and (is_shared or not evidence.names_fsdp))):
        grade = "likely" if evidence.shows("fsdp") or not lacking else "possible"
    return Match(entry, "possible" if against else grade, tuple(questions), against)


def _list_contradictions(entry: KnownFailure, evidence: Evidence) -> Iterator[str]:
    for name in entry.contradicted_by:
        if evidence.shows(name):
            yield f"the log shows that {CLUES[name].fact}"
    if entry.one_rank and evidence.ranks > 1:
        yield f"{evidence.ranks} ranks raised the exception, but only one does in this failure"
    if evidence.script and not entry.is_raised_in(evidence.script):
        yield f"a line of {evidence.script} raised the exception, which may mean something else there"
    innermost = evidence.traceback.rpartition("\n")[2]
    is_its = entry.is_raised_in(innermost) or (entry.frames and entry.has_frame(innermost))
    if (match := _PACKAGE.search(innermost)) and not is_its:
        yield f"the innermost frame is {match[1]}'s"
    if match := _OTHER_SHARDING.search(evidence.traceback):
        yield f"the traceback goes through {match[1]}"
    if not entry.shows_on(evidence.torch):
        yield f"the log names torch {evidence.torch}, but this failure needs {entry.torch}"
