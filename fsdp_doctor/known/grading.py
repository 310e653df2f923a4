"""How sure an entry of the catalogue is to be the failure that a log shows, by the evidence for it."""

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
    """The evidence of one failure in a log.

    message: ``Type: message``. traceback: its frames. script: the file, not torch's, whose own line raised it; empty
    where none is known to have. indirect: the message stands somewhere else than where it was raised, as in prose.
    log: the facts that the whole log shows. torch: the version that it names; empty where it names none.
    """

    message: str
    traceback: str = ""
    script: str = ""
    indirect: bool = False
    log: Collection[ClueName] = ()
    torch: str = ""

    def shows(self, name: ClueName) -> bool:
        """Whether the failure itself shows a fact, by its message or its traceback, or the rest of the log does."""
        return name in self.log or CLUES[name].shown.search(f"{self.message}\n{self.traceback}") is not None


@dataclass(frozen=True)
class Match:
    """An entry with the message of a failure, how sure it is, and the questions that would make it sure."""

    entry: KnownFailure
    grade: Grade
    open: tuple[str, ...] = ()


def match_evidence(evidence: Evidence) -> list[Match]:
    """The entries that the failure may be, the surest first; those that the evidence speaks against are left out.

    Of those that are known, one that wanted certain frames comes first; else what the matrix reproduces before what was
    only reported.
    """
    graded = (_grade(entry, evidence) for entry in known_failures() if entry.matches_message(evidence.message))
    return sorted((match for match in graded if match is not None), key=_order)


def _order(match: Match) -> tuple[int, bool, bool]:
    is_vague = match.grade == "known" and not match.entry.frames
    return _ORDER.index(match.grade), is_vague, not match.entry.reproduced


def _grade(entry: KnownFailure, evidence: Evidence) -> Match | None:
    if entry.is_excluded_by(evidence.traceback):
        return None
    lacking = [name for name in entry.needs if not evidence.shows(name)]
    lacks_frame = bool(entry.frames) and not entry.has_frame(evidence.traceback)
    # A clue without hints is shown by the failure itself alone.
    elsewhere = lacks_frame or any(not CLUES[name].hints for name in lacking)
    if evidence.traceback and elsewhere and not evidence.shows("fsdp"):
        return None
    questions = [f"does the traceback go through {entry.place}?"] if lacks_frame else []
    questions += [CLUES[name].ask for name in lacking]
    if evidence.indirect:
        questions.append("where was it raised? The log has no traceback of it")
    raised_by_script = evidence.script and not entry.is_raised_in(evidence.script)
    if raised_by_script:
        questions.append(f"does {evidence.script} pass on an error of torch's? It raised this one in a line of its own")
    other_torch = not entry.shows_on(evidence.torch)
    if other_torch:
        questions.append(f"which torch is it? The log names {evidence.torch}, and this needs {entry.torch}")
    grade: Grade
    if raised_by_script or other_torch:
        grade = "possible"
    elif not elsewhere and not lacking:
        grade = "likely" if evidence.indirect else "known"
    else:
        # A message that many programs raise is no diagnosis where nothing says where it was raised.
        grade = "likely" if evidence.shows("fsdp") and not elsewhere else "possible"
    return Match(entry, grade, tuple(questions))
