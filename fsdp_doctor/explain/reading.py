"""Reads facts from the log about a failure for which the catalogue has no certain entry."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fsdp_doctor.explain.circumstances import find_causes, join_causes
from fsdp_doctor.explain.exceptions import Raised
from fsdp_doctor.explain.keys import read_load_keys
from fsdp_doctor.explain.loaded_sizes import read_loaded_sizes
from fsdp_doctor.explain.mechanisms import Mechanism, Reading, apply_mechanism, read_mechanisms
from fsdp_doctor.explain.places import JobCall, find_when, find_who, shorten
from fsdp_doctor.explain.refusals import read_refusal, read_versions

# Messages that say that the log has the reason elsewhere.
_POINTS_ELSEWHERE = ("above report", "report above", "see above", "the above error")


# Beginnings of sentences in which a message gives advice, and words of advice that has no use.
_ADVICE = re.compile(
    r"(?:^|(?<=[.!?:;] )|(?<=\n))(?:[Pp]lease )?(?:Try|Consider|Change|Set|Pass|Make sure|Ensure|Use|Specify|Install"
    r"|Upgrade|Disable|Enable|Call|(?<=lease )[a-z]+|You (?:can|should|need to|must|may want to)"
    r"|To (?:fix|avoid|resolve) this) [^\n]{8,200}?(?:\.(?=\s|$)|$)",
    re.MULTILINE,
)
_BOILERPLATE = re.compile(
    r"(?i)report|file (?:an?|the) |open (?:an?|the) |issue|TORCH_USE_CUDA_DSA|CUDA_LAUNCH_BLOCKING|Search for|debugging"
    r"|HYDRA_FULL|NCCL_DEBUG|documentation|more information|stack ?trace|traceback"
)


def read_failure(
    raised: Raised,
    versions: Mapping[str, str],
    call: JobCall | None,
    told: str = "",
) -> Reading | None:
    """Returns the facts about one exception; None if neither its message nor its frames show a fact.

    versions: the versions of packages that the log names.
    call: the line of the job that led to the exception; None if the log does not have it.
    told: the sentences of the log, which may name circumstances.
    """
    clash, decide, is_vague = _read_clash(raised, versions, call, told)
    when, who = find_when(raised.frames), find_who(raised.frames)
    decide = " ".join(filter(None, (decide, _write_advice(raised))))
    if not (clash or who or when or decide):
        return None
    called = call.where if call is not None else ""
    place = f"{raised.file}, line {raised.line}"
    return Reading(clash=clash, decide=decide, who=who, when=when, called=called, lines=(place,), vague=is_vague)


def _read_clash(raised: Raised, versions: Mapping[str, str], call: JobCall | None, told: str) -> tuple[str, str, bool]:
    """Returns the fields ``clash``, ``decide`` and ``vague`` of the exception's :class:`Reading`.

    Tries versions that do not match, the keys of a load and the sizes of loaded weights first, then the table of
    mechanisms, and then the form of the traceback.
    """
    if raised.cut:
        return "", "", True
    text = " ".join((*raised.text.split(), raised.asserted))
    if found := read_versions(raised, versions) or read_load_keys(text):
        return *found, False
    shown = "\n".join((*raised.frames, *raised.code_of.values()))
    if found := read_loaded_sizes(text, told, shown):
        return *found, False
    if mechanism_found := _read_mechanism(raised, text, told):
        return mechanism_found
    if found := read_refusal(raised, call):
        return *found, any(words in raised.text for words in _POINTS_ELSEWHERE)
    return "", "", True


def _write_advice(raised: Raised) -> str:
    """Writes the advice in the message; empty if it has no useful advice."""
    advice = next((match for match in _ADVICE.finditer(raised.message) if not _BOILERPLATE.search(match[0])), None)
    return f'The message advises: "{shorten(advice[0].strip())}".' if advice else ""


def _read_mechanism(raised: Raised, text: str, told: str) -> tuple[str, str, bool] | None:
    """Applies the first mechanism that the message shows; None if it shows none.

    Returns (the contradiction, the deciding step, whether a symptom of the log would say more).
    """
    for mechanism in read_mechanisms():
        if mechanism.symptom or not _is_placed(mechanism, raised):
            continue
        if found := apply_mechanism(mechanism, text):
            return *_add_circumstances(*found, mechanism.subjects, raised, told), mechanism.vague
    return None


def read_other_failure(others: Iterable[Raised], told: str) -> Reading | None:
    """Returns the facts about the first of the other exceptions whose message shows a mechanism; None if none does."""
    for raised in others:
        found = _read_mechanism(raised, " ".join((*raised.text.split(), raised.asserted)), told)
        if found and not found[2]:
            place = f"{raised.file}, line {raised.line}"
            clash = f"another exception of the log says more ({shorten(raised.text)}): {found[0]}"
            return Reading(clash=clash, decide=found[1], who=find_who(raised.frames), lines=(place,))
    return None


def _is_placed(mechanism: Mechanism, raised: Raised) -> bool:
    """Returns whether the traceback shows the place and the line of code that a mechanism belongs to."""
    places = mechanism.place is None or any(map(mechanism.place.search, raised.frames))
    places = places or (mechanism.placeless and not raised.frames)
    return places and (mechanism.code is None or any(map(mechanism.code.search, raised.code_of.values())))


def _add_circumstances(clash: str, decide: str, subjects: Sequence[str], raised: Raised, told: str) -> tuple[str, str]:
    """Adds the circumstances that the log names to ``clash``, and the causes that they suggest to ``decide``."""
    if not subjects:
        return clash, decide
    shown = (told, raised.text, *raised.frames, *raised.code_of.values())
    names, causes = find_causes("\n".join(shown), subjects)
    if not names:
        return clash, decide
    return f"{clash} (the log names: {', '.join(names)})", f"{join_causes(causes)} {decide}"


def read_version_clash(raised: Raised, versions: Mapping[str, str]) -> Reading | None:
    """Returns the facts about a failure of two versions that do not fit together; None for any other failure."""
    if (found := read_versions(raised, versions)) is None:
        return None
    place = f"{raised.file}, line {raised.line}"
    return Reading(clash=found[0], decide=found[1], who=find_who(raised.frames), lines=(place,))


def read_symptom(symptom: Reading | None, told: str) -> Reading | None:
    """Adds to a symptom the causes that circumstances of the log suggest; None if there is no symptom."""
    if symptom is None:
        return None
    names, causes = find_causes(told, symptom.subjects)
    named = f" (the log names: {', '.join(names)})" if names else ""
    decide = " ".join(filter(None, (join_causes(causes), symptom.decide)))
    return replace(symptom, clash=f"{symptom.clash}{named}", decide=decide)


def read_hang(told: str) -> Reading | None:
    """Returns the causes of a hang that the log's circumstances suggest; None if the log names no circumstance."""
    names, causes = find_causes(told, ("hang",))
    if not names:
        return None
    return Reading(
        clash=f"ranks that are not in the same collective (the log names: {', '.join(names)})",
        decide=join_causes(causes),
        lines=("the text around the messages",),
    )
