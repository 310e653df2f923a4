"""An explanation as text."""

from __future__ import annotations

from fsdp_doctor.explain import foreign
from fsdp_doctor.explain.cause import Explanation
from fsdp_doctor.explain.entry_text import entry_lines, wrapped
from fsdp_doctor.explain.exception_groups import Group
from fsdp_doctor.explain.exceptions import Raised
from fsdp_doctor.explain.hang_text import hang_lines
from fsdp_doctor.explain.log_input import MOST_OF_A_STREAM
from fsdp_doctor.known.catalogue import KnownFailure
from fsdp_doctor.known.grading import Match

_SHOWN_RANKS = 8
_SHOWN_LINES = 6
_SHOWN_OTHERS = 3
# How many entries are printed whole; a known one alone.
_SHOWN_ENTRIES = 2
ATTACH = (
    "the whole traceback of the rank that failed first",
    "`fsdp-doctor env`, from the same environment",
    "`fsdp-doctor probe --fix --markdown report.md`, from the same machine",
    "the configuration, or what `fsdp-doctor check CONFIG` makes of it",
)


def as_text(found: Explanation, width: int) -> str:
    """width: in columns. Code and commands are not wrapped."""
    lines = _heading(found) + hang_lines(found, width) + _notes(found)
    if found.showing == "failure" and not found.ours:
        lines += _not_ours(found, width)
    elif found.matches:
        lines += _matches(found.matches, width)
    elif found.showing == "failure":
        lines += _unknown(found)
    if attach(found):
        lines += ["", "To report it, attach:", *(f"  - {what}" for what in ATTACH)]
    return "\n".join(lines) + "\n"


def attach(found: Explanation) -> bool:
    """Whether it is a failure of FSDP's that the catalogue does not know for certain."""
    return found.showing != "nothing" and found.ours and found.entry is None


def _heading(found: Explanation) -> list[str]:
    cause, summary = found.cause, found.summary
    if found.showing == "hang":
        return ["The job hung: a collective did not end."]
    if cause is None:
        told = f"There is no exception in the log. {summary.sentence}." if summary else "The log shows no failure."
        if found.killed_for_memory and summary is None:
            told = "There is no exception in the log."
        if found.dumps:
            told = "Every collective in the flight recorder's dumps has ended, and the ranks called the same ones."
        return [told, *_ended(found)]
    if found.showing == "cut":
        return _cause("The log ends within a traceback, before its exception", cause)
    if found.showing == "consequences":
        return _cause(
            f"The log has only consequences of a failure elsewhere ({cause.consequence}); the first of them", cause
        )
    return _cause("Root cause", cause)


def _ended(found: Explanation) -> list[str]:
    """What a process that said nothing may have died of."""
    if found.killed_for_memory:
        return [f"A process was killed for want of host memory ({found.killed_for_memory}): look there first."]
    if found.summary is None or found.summary.ended != "SIGKILL":
        return []
    return [
        "SIGKILL is mostly the kernel's, for want of host memory: `dmesg | grep -i oom` on that host says so, or the "
        "container's limit was reached."
    ]


def _came_first(other: Raised, cause: Group | None) -> bool:
    """Whether it ended another rank, as far as one can see, before the cause was raised: it may be one, too."""
    if cause is None or not other.source or other.source in cause.sources or not other.frames:
        return False
    if other.swallowed or other.logged or other.quoted or other.file != cause.first.file:
        return False
    return other.line < cause.first.line


def _cause(heading: str, group: Group) -> list[str]:
    lines = [f"{heading}: {_where(group.first)}{_who(group)}", ""]
    shown = [] if group.first.cut else group.first.text.splitlines()
    lines += [f"    {line.strip()}" for line in shown[:_SHOWN_LINES]]
    lines += ["    ..."] if len(shown) > _SHOWN_LINES else []
    lines += [f"      at {frame}" for frame in telling_frames(group.first)]
    return lines


def _notes(found: Explanation) -> list[str]:
    lines = []
    if found.showing == "consequences" and not found.killed_for_memory:
        lines.append(
            "The rank that failed or hung first is not in this log: look at its own log, and at every rank's stack."
        )
    if found.showing == "consequences" or (found.killed_for_memory and found.showing != "nothing"):
        lines += _ended(found)
    for other in found.others[:_SHOWN_OTHERS]:
        doubt = "Came first, on another rank" if _came_first(other, found.cause) else "Probably not the cause"
        lines.append(f"{doubt}: {(other.text.splitlines() or [''])[0][:200]} ({_where(other)})")
    if (more := max(0, len(found.others) - _SHOWN_OTHERS) + found.dropped) > 0:
        lines.append(f"and {more} more exceptions")
    for name, count in found.consequences.items() if found.showing != "hang" else ():
        lines.append(f"Consequence: {name} ({count} times)" if count > 1 else f"Consequence: {name}")
    if found.summary is not None and found.showing != "nothing":
        lines.append(f"{found.summary.sentence}.")
    lines += [f"Only the first {MOST_OF_A_STREAM >> 20} MiB of {name} were read." for name in found.truncated]
    return ["", *lines] if lines else []


def _matches(matches: tuple[Match, ...], width: int) -> list[str]:
    """The known one whole; where none is known, the first ones, with what would make them sure."""
    grade = matches[0].grade
    whole = [match for match in matches if match.grade == grade][: 1 if grade == "known" else _SHOWN_ENTRIES]
    lines = []
    for match in whole:
        lines += ["", *_graded(match, width)]
    rest = tuple(match.entry for match in matches if match not in whole)
    return lines + _listed("Other entries with the same message (`fsdp-doctor explain --entry ID`):", rest)


def _graded(match: Match, width: int) -> list[str]:
    lines = entry_lines(match.entry, width)
    lines[0] = f"{match.grade.capitalize()}: {lines[0]}"
    if match.open:
        lines += ["To be sure:", *(f"  - {question}" for question in match.open)]
    return lines


def _not_ours(found: Explanation, width: int) -> list[str]:
    seen = found.cause is not None and found.cause.first.frames
    verdict = "No failure of FSDP's." if seen or found.foreign else "Nothing says that it is a failure of FSDP's."
    what = f" It is about {found.foreign}." if found.foreign else ""
    where = "its traceback" if seen else "the log"
    why = f"Neither its message nor {where} names FSDP, a DTensor or a sharded checkpoint."
    if seen and found.cause is not None and foreign.is_raised_anywhere(found.cause.first.text):
        why = "It is raised wherever the program happens to be, so its traceback does not say what caused it."
    entries = tuple(match.entry for match in found.matches)
    lines = ["", *wrapped(f"{verdict}{what} {why}", width)]
    return lines + _listed("Only if the model is under FSDP all the same:", entries)


def _unknown(found: Explanation) -> list[str]:
    lines = ["", "It is not in the catalogue of known failures."]
    return lines + _listed("Entries with a similar message, which may have another cause:", found.near)


def _listed(heading: str, entries: tuple[KnownFailure, ...]) -> list[str]:
    return ["", heading, *(f"  {entry.id}: {entry.title}" for entry in entries)] if entries else []


def _who(group: Group) -> str:
    """The ranks that raised it, or how often it was raised; nothing where it was once and nothing says by whom."""
    named = sorted((source for source in group.sources if source), key=natural)
    if not named:
        return f" ({group.count} times)" if group.count > 1 else ""
    more = f" and {len(named) - _SHOWN_RANKS} more" if len(named) > _SHOWN_RANKS else ""
    return f" ({', '.join(named[:_SHOWN_RANKS])}{more})"


def natural(source: str) -> tuple[str, int]:
    """For sorting: ``rank 10`` after ``rank 9``."""
    word, _, number = source.partition(" ")
    first = number.split(" ")[0]
    return word, int(first) if first.isdecimal() and len(first) < 20 else 0


def _where(raised: Raised) -> str:
    return f"{raised.file}, line {raised.line}"


def telling_frames(raised: Raised) -> list[str]:
    """The innermost frame, and before it the innermost one that is not torch's."""
    own = [frame for frame in raised.frames if "/torch/" not in frame and 'File "torch/' not in frame]
    return list(dict.fromkeys([*own[-1:], *raised.frames[-1:]]))
