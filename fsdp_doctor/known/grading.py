"""How sure an entry of the catalogue is to be the failure that a log shows: evidence before confidence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp_doctor.known.catalogue import known_failures
from fsdp_doctor.known.clues import CLUES, ClueName
from fsdp_doctor.known.failures import KnownFailure

Grade: TypeAlias = Literal["known", "likely", "possible"]
_ORDER: tuple[Grade, ...] = ("known", "likely", "possible")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a log says of one failure.

    message: ``Type: message``. traceback: its frames. script: the file, not torch's, whose own line raised it; empty
    where none is known to have. indirect: it is told from something else than where it was
    raised, as a message in prose. log: what the whole log shows of the run. torch: the version that it names; empty
    where it names none.
    """

    message: str
    traceback: str = ""
    script: str = ""
    indirect: bool = False
    log: Collection[ClueName] = ()
    torch: str = ""

    def own(self, name: ClueName) -> bool:
        """Whether the failure itself shows it, by its message or its traceback."""
        return CLUES[name].shown.search(f"{self.message}\n{self.traceback}") is not None

    def shows(self, name: ClueName) -> bool:
        return self.own(name) or name in self.log


@dataclass(frozen=True)
class Match:
    """An entry with the message of a failure, how sure it is, and what would make it sure: questions to the user."""

    entry: KnownFailure
    grade: Grade
    open: tuple[str, ...] = ()


def matches(evidence: Evidence) -> list[Match]:
    """The entries that it may be, the surest first; those that the evidence speaks against are left out.

    Of those that are known, one that wanted certain frames comes first; else what the matrix reproduces before what was
    only reported.
    """
    said = [entry for entry in known_failures() if entry.says(evidence.message)]
    found = [match for match in (_graded(entry, evidence) for entry in said) if match is not None]
    return sorted(found, key=_rank)


def _rank(match: Match) -> tuple[int, bool, bool]:
    vague = match.grade == "known" and not match.entry.frames
    return _ORDER.index(match.grade), vague, not match.entry.reproduced


def _graded(entry: KnownFailure, evidence: Evidence) -> Match | None:
    if entry.speaks_against(evidence.traceback):
        return None
    lacking = [name for name in entry.needs if not evidence.shows(name)]
    frameless = bool(entry.frames) and not entry.has_frame(evidence.traceback)
    elsewhere = frameless or any(not CLUES[name].hints for name in lacking)
    if evidence.traceback and elsewhere and not evidence.shows("fsdp"):
        # There is a traceback, it is another one, and nothing in the log has to do with FSDP.
        return None
    questions = [f"does the traceback go through {entry.place}?"] if frameless else []
    questions += [CLUES[name].ask for name in lacking]
    if evidence.indirect:
        questions.append("where was it raised? The log has no traceback of it")
    sure = not elsewhere and not lacking
    scripted = evidence.script and not entry.is_raised_in(evidence.script)
    if scripted:
        questions.append(f"does {evidence.script} pass on an error of torch's? It raised this one in a line of its own")
    other_torch = not entry.shows_on(evidence.torch)
    if other_torch:
        questions.append(f"which torch is it? The log names {evidence.torch}, and this needs {entry.torch}")
    grade: Grade
    if scripted or other_torch:
        grade = "possible"
    elif sure:
        grade = "likely" if evidence.indirect else "known"
    else:
        # What many programs raise is no diagnosis where nothing says where it was raised.
        grade = "likely" if evidence.shows("fsdp") and not elsewhere else "possible"
    return Match(entry, grade, tuple(questions))
