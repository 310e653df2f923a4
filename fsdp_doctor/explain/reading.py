"""Reads facts from the log about a failure for which the catalogue has no certain entry."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_doctor.explain.exceptions import Raised
from fsdp_doctor.explain.keys import read_load_keys
from fsdp_doctor.explain.mechanisms import Reading, apply_mechanism, read_mechanisms
from fsdp_doctor.explain.places import JobCall, find_when, find_who
from fsdp_doctor.explain.refusals import read_refusal, read_versions

# Messages that say that the log has the reason elsewhere.
_POINTS_ELSEWHERE = ("above report", "report above", "see above", "the above error")


def read_failure(raised: Raised, versions: Mapping[str, str], call: JobCall | None) -> Reading | None:
    """Returns the facts about one exception; None if neither its message nor its frames show any.

    versions: the versions of packages that the log names.
    call: the line of the job that led to the exception; None if the log does not have it.
    """
    clash, decide, is_vague = _read_clash(raised, versions, call)
    who, when = find_who(raised.frames), find_when(raised.frames)
    if not (clash or who or when):
        return None
    called = call.where if call is not None else ""
    place = f"{raised.file}, line {raised.line}"
    return Reading(clash=clash, decide=decide, who=who, when=when, called=called, lines=(place,), vague=is_vague)


def _read_clash(raised: Raised, versions: Mapping[str, str], call: JobCall | None) -> tuple[str, str, bool]:
    """Returns (the contradiction, the command or question that decides, whether a symptom of the log would say more).

    A mechanism that the message shows comes first, and then the form of the traceback.
    """
    text = " ".join((*raised.text.split(), raised.asserted))
    if found := read_versions(raised, versions) or read_load_keys(text):
        return *found, False
    for mechanism in read_mechanisms():
        if not mechanism.symptom and (found := apply_mechanism(mechanism, text)):
            return *found, mechanism.vague
    if found := read_refusal(raised, call):
        return *found, any(words in raised.text for words in _POINTS_ELSEWHERE)
    return "", "", True


def read_version_clash(raised: Raised, versions: Mapping[str, str]) -> Reading | None:
    """Returns the facts about a failure of two versions that do not fit together; None for any other failure."""
    if (found := read_versions(raised, versions)) is None:
        return None
    place = f"{raised.file}, line {raised.line}"
    return Reading(clash=found[0], decide=found[1], who=find_who(raised.frames), lines=(place,))
