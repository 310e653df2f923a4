"""Renders an explanation, or an entry of the catalogue, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from fsdp_doctor.explain.cause import Explanation, Group
from fsdp_doctor.explain.exceptions import Raised
from fsdp_doctor.explain.hangs import Hang, Waiting, name_waiting_ranks
from fsdp_doctor.explain.log_input import MAX_STREAM
from fsdp_doctor.explain.mechanisms import Reading
from fsdp_doctor.fixes.entry import find_fix_command
from fsdp_doctor.known.clues import CLUES
from fsdp_doctor.known.failures import NOT_RUN, KnownFailure
from fsdp_doctor.known.grading import Match
from fsdp_doctor.machine.terminal import wrap, wrap_lines

_MAX_RANKS = 8
_MAX_LINES = 6
_MAX_OTHERS = 3
_MAX_ROWS = 16
_MAX_WAITING_IN_JSON = 256
# How many entries are printed whole, if none is known for certain, and how many possible ones are named.
_MAX_ENTRIES = 2
_MAX_POSSIBLE = 3
_ATTACHMENTS = (
    "the whole traceback of the rank that failed first",
    "`fsdp-doctor env`, from the same environment",
    "`fsdp-doctor probe --fix --markdown report.md`, from the same machine",
    "the configuration, or the output of `fsdp-doctor check CONFIG`",
)
_NO_FAILURE = (
    "This program found no failure in the log. If the job failed, pass the whole log of the failed rank, or the end "
    "of this log."
)
_HANG_HEADER = ("group", "waits in", "in", "out", "last launched", "last done", "seconds")
_ASK_FOR_DUMPS = (
    "To see what each rank did, and the calling code, run again with TORCH_FR_BUFFER_SIZE=2000 and "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1, and pass the dumps of all ranks to `fsdp-doctor explain`."
)
_WAYS = (
    "  - while it hangs, `py-spy dump --pid PID > rankN.txt` for each rank N: `fsdp-doctor explain rank*.txt` says "
    "which rank is elsewhere",
    "  - with NCCL, start it with TORCH_FR_BUFFER_SIZE=2000 (before torch 2.9 TORCH_NCCL_TRACE_BUFFER_SIZE) and "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1: `fsdp-doctor explain nccl_trace_rank_*` compares the collectives of the ranks",
    "  - start it with TORCH_DISTRIBUTED_DEBUG=DETAIL: look for `Detected mismatch between collectives`, which names "
    "two ranks with different calls, and for `monitoredBarrier`, which names a rank that did not come",
)


def render_text(explanation: Explanation, width: int) -> str:
    """Renders the explanation as text, the answer first.

    width: the width in columns. Code and commands are not wrapped.
    """
    lines = wrap_lines([*_render_answer(explanation), *_render_heading(explanation)], width)
    if explanation.hang is not None:
        lines += _render_hang(explanation.hang, width, ask=explanation.showing == "hang")
    lines += wrap_lines(_render_notes(explanation), width)
    lines += wrap_lines(_render_reading(explanation), width)
    if explanation.matches and (explanation.showing != "failure" or explanation.about_fsdp):
        lines += _match_lines(explanation, width)
    elif explanation.matches:
        lines += _possible_lines(explanation.matches, width)
    if _needs_report(explanation):
        lines += ["", "To report it, attach:", *(f"  - {attachment}" for attachment in _ATTACHMENTS)]
    return "\n".join(lines) + "\n"


def render_json(explanation: Explanation) -> str:
    cause, entry, hang = explanation.cause, explanation.entry, explanation.hang
    data = {
        "schema": "fsdp-doctor/explanation",
        "schema_version": 2,
        "showing": explanation.showing,
        "matched": entry is not None,
        "grade": explanation.grade,
        "cause": _convert_cause_to_dict(cause) if cause is not None else None,
        "entry": convert_entry_to_dict(entry) if entry is not None else None,
        "fix": _find_fix(entry, explanation) if entry is not None else "",
        "matches": [_match_as_dict(match) for match in explanation.matches],
        "reading": dataclasses.asdict(explanation.reading) if explanation.reading is not None else None,
        "ours": explanation.about_fsdp,
        "foreign": explanation.foreign,
        "noted": list(explanation.noted),
        "about": explanation.about,
        "hang": _convert_hang_to_dict(hang) if hang is not None else None,
        "consequences": explanation.consequences,
        "others": [
            {"text": raised.text, "file": raised.file, "line": raised.line}
            for raised in explanation.others[:_MAX_OTHERS]
        ],
        "torchrun": explanation.summary.sentence if explanation.summary is not None else None,
        "attach": list(_ATTACHMENTS) if _needs_report(explanation) else [],
        "truncated": list(explanation.truncated),
    }
    return json.dumps(data, indent=1)


def choose_frames(raised: Raised) -> list[str]:
    """Returns the innermost frame, preceded by the innermost frame outside torch if that is another frame."""
    outside = [frame for frame in raised.frames if "/torch/" not in frame and 'File "torch/' not in frame]
    return list(dict.fromkeys([*outside[-1:], *raised.frames[-1:]]))


def _needs_report(explanation: Explanation) -> bool:
    """Returns whether the failure is about FSDP and has no certain entry in the catalogue."""
    return explanation.showing != "nothing" and explanation.about_fsdp and explanation.entry is None


# The heading, and notes on the rest of the log


def _render_answer(explanation: Explanation) -> list[str]:
    """Renders the answer to a failure in one sentence; empty for other logs, whose heading is the answer."""
    if explanation.showing != "failure":
        return []
    if explanation.foreign:
        return [f"No failure of FSDP's: the log is about {explanation.foreign}.", ""]
    if not explanation.matches:
        about = f"The failure is about {explanation.about}, and" if explanation.about else "It is"
        clash = _write_clash(explanation.reading) if explanation.reading is not None else ""
        return [
            f"{about} not in the catalogue of known failures. {clash}".rstrip(),
            *_write_decision(explanation.reading),
            "",
        ]
    if explanation.grade == "possible":
        clash = _write_clash(explanation.reading) if explanation.reading is not None else ""
        may_be = "This may be a known failure, but the log does not say which one."
        return [f"{may_be} {clash}".rstrip(), *(_write_decision(explanation.reading) if clash else []), ""]
    entry, places = explanation.matches[0].entry, _join_places(explanation)
    fix = _find_fix(entry, explanation)
    lines = [_name_match(explanation.matches[0]), *([f"Fix: {fix}"] if fix else [])]
    return [*lines, *_list_remedies(entry, places)[: explanation.grade == "known"], ""]


def _write_clash(reading: Reading) -> str:
    return f"What the log shows: {reading.clash}." if reading.clash else ""


def _write_decision(reading: Reading | None) -> list[str]:
    return [f"To find the cause: {reading.decide}"] if reading is not None and reading.decide else []


def _render_reading(explanation: Explanation) -> list[str]:
    """Renders the facts of the reading that are not already in the answer."""
    reading = explanation.reading
    if reading is None:
        return []
    lines = ["", f"Read from {', '.join(reading.lines)}:"]
    is_in_answer = explanation.showing == "nothing" or (
        explanation.showing == "failure"
        and (not explanation.matches or (explanation.grade == "possible" and reading.clash))
    )
    lines += [f"  who: {reading.who}"] if reading.who else []
    lines += [f"  when: {reading.when}"] if reading.when else []
    lines += [f"  called at: {reading.called}"] if reading.called and reading.called not in reading.decide else []
    if not is_in_answer:
        lines += [f"  {line}" for line in (_write_clash(reading), *_write_decision(reading)) if line]
    if len(lines) > 2:
        return lines
    return ["", f"Read from {', '.join(reading.lines)}."] if explanation.showing == "nothing" else []


def _name_match(match: Match) -> str:
    return f"{match.grade.capitalize()}: {_name_entry(match.entry)}"


def _name_entry(entry: KnownFailure) -> str:
    return f"{entry.id} ({entry.short_code}): {entry.title}"


def _render_heading(explanation: Explanation) -> list[str]:
    cause, summary = explanation.cause, explanation.summary
    if explanation.showing == "hang":
        return ["The job hung: a collective did not end.", *_name_known_hang(explanation)]
    if cause is None:
        if (symptom := explanation.reading) is not None:
            read_as = "What its text tells is no known symptom" if symptom.vague else "It can be read as this symptom"
            return [
                f"There is no exception in the log. {read_as}: {symptom.clash}.",
                *_write_decision(symptom),
            ]
        sentence = f"There is no exception in the log. {summary.sentence}." if summary else _NO_FAILURE
        if (explanation.killed_for_memory or explanation.noted) and summary is None:
            sentence = "There is no exception in the log."
        if explanation.dumps:
            sentence = (
                "Every collective in the flight recorder's dumps has ended, and all ranks called the same collectives."
            )
        return [sentence, *_render_host_memory_hint(explanation)]
    if explanation.showing == "cut":
        return _render_cause("The log ends within a traceback, before its exception", cause)
    if explanation.showing == "consequences":
        heading = f"The log has only consequences of a failure elsewhere ({cause.consequence}); the first consequence"
        return _render_cause(heading, cause)
    return _render_cause("Root cause", cause)


def _name_known_hang(explanation: Explanation) -> list[str]:
    """Renders the known or likely entry of a hang, and the remedy if the entry is known."""
    if explanation.grade not in ("known", "likely"):
        return []
    remedies = _list_remedies(explanation.matches[0].entry, _join_places(explanation))
    return [_name_match(explanation.matches[0]), *remedies[: explanation.grade == "known"]]


def _render_cause(heading: str, group: Group) -> list[str]:
    lines = [f"{heading}: {_describe_place(group.first)}{_name_raising_ranks(group)}", ""]
    message = [] if group.first.cut else group.first.text.splitlines()
    lines += [f"    {line.strip()}" for line in message[:_MAX_LINES]]
    lines += ["    ..."] if len(message) > _MAX_LINES else []
    return lines + [f"      at {frame}" for frame in choose_frames(group.first)]


def _render_host_memory_hint(explanation: Explanation) -> list[str]:
    """Renders a hint that a process without a message may have been killed for lack of host memory."""
    if explanation.killed_for_memory:
        return [f"A process was killed for lack of host memory ({explanation.killed_for_memory}): look there first."]
    if explanation.summary is None or explanation.summary.ended != "SIGKILL":
        return []
    return [
        "SIGKILL usually comes from the kernel, because the host ran out of memory: check `dmesg | grep -i oom` on "
        "the host. Otherwise the container's memory limit was reached."
    ]


def _render_notes(explanation: Explanation) -> list[str]:
    lines = []
    summary = explanation.summary
    is_elsewhere = explanation.showing == "consequences"
    if is_elsewhere and not explanation.killed_for_memory:
        is_here = summary is None or (explanation.cause is not None and summary.is_one_of(explanation.cause.sources))
        where = "the logs of the other ranks" if is_here or summary is None else f"rank {summary.rank}'s own log"
        lines.append(f"The original failure is not in the logs that were read: look in {where}.")
        if explanation.may_hang:
            asked = "If the job hung before that, find out where each rank waits: run it again, and then one of these:"
            lines += [asked, *_WAYS]
    if is_elsewhere or (explanation.killed_for_memory and explanation.showing != "nothing"):
        lines += _render_host_memory_hint(explanation)
    lines += explanation.noted
    lines += [_describe_other(other, explanation.cause) for other in explanation.others[:_MAX_OTHERS]]
    if (more := max(0, len(explanation.others) - _MAX_OTHERS) + explanation.dropped) > 0:
        lines.append(f"and {more} more exceptions")
    for name, count in explanation.consequences.items() if explanation.showing != "hang" else ():
        lines.append(f"Consequence: {name} ({count} times)" if count > 1 else f"Consequence: {name}")
    if explanation.summary is not None and explanation.showing != "nothing":
        lines.append(f"{explanation.summary.sentence}.")
    lines += [f"Only the first {MAX_STREAM >> 20} MiB of {name} were read." for name in explanation.truncated]
    return ["", *lines] if lines else []


def _describe_other(other: Raised, cause: Group | None) -> str:
    first_line = (other.text.splitlines() or [""])[0]
    if cause is not None and first_line == (cause.first.text.splitlines() or [""])[0] and other.frames:
        who = f", by {other.source}" if other.source else ""
        frames = ", called from ".join(reversed(choose_frames(other)))
        return f"Raised elsewhere, too, with the same message{who} ({_describe_place(other)}): at {frames}"
    doubt = "Came first, on another rank" if _came_first(other, cause) else "Probably not the cause"
    return f"{doubt}: {first_line[:200]} ({_describe_place(other)})"


def _came_first(other: Raised, cause: Group | None) -> bool:
    """Returns whether the exception ended another rank before the cause was raised, as far as the log shows."""
    if cause is None or not other.source or other.source in cause.sources or not other.frames:
        return False
    if other.swallowed or other.logged or other.quoted or other.file != cause.first.file:
        return False
    return other.line < cause.first.line


def _name_raising_ranks(group: Group) -> str:
    """Names the ranks that raised the exception.

    If the ranks are not known, says how often the exception was raised; empty if it was raised once.
    """
    sources = sorted((source for source in group.sources if source), key=_make_natural_key)
    if not sources:
        return f" ({group.count} times)" if group.count > 1 else ""
    more = f" and {len(sources) - _MAX_RANKS} more" if len(sources) > _MAX_RANKS else ""
    return f" ({', '.join(sources[:_MAX_RANKS])}{more})"


def _make_natural_key(source: str) -> tuple[str, int]:
    """Makes a key that sorts ``rank 10`` after ``rank 9``."""
    word, _, number = source.partition(" ")
    first = number.split(" ")[0]
    return word, int(first) if first.isdecimal() and len(first) < 20 else 0


def _describe_place(raised: Raised) -> str:
    return f"{raised.file}, line {raised.line}"


# Entries of the catalogue


def render_entry(entry: KnownFailure, width: int) -> list[str]:
    """Renders the whole entry as lines of at most ``width`` columns; code and commands may be wider."""
    return [*wrap(_name_entry(entry), width), "", *_render_body(entry, width)]


def _render_body(
    entry: KnownFailure,
    width: int,
    *,
    conditions: Sequence[str] | None = None,
    places: str = "",
    is_named: bool = False,
) -> list[str]:
    """Renders the entry without its name.

    conditions: the questions that are open before the entry is certain; None if there is no log, so that all conditions
        of the entry are open.
    places: the traceback, which selects the frameworks whose remedies are rendered; empty for all frameworks.
    is_named: whether the answer already has the first remedy.
    """
    lines = []
    if conditions:
        lines += wrap_lines(["To be sure:", *(f"  - {condition}" for condition in conditions)], width)
    if entry.needs and conditions is None:
        lines += wrap(f"Only if {', and '.join(CLUES[name].fact for name in entry.needs)}.", width)
    lines += wrap(f"Cause: {entry.cause}", width)
    for remedy in _list_remedies(entry, places)[is_named:]:
        lines += wrap(remedy, width)
    if entry.code:
        lines += ["", *(f"    {line}" for line in entry.code.strip("\n").splitlines()), ""]
    if command := make_remedy_command(entry):
        lines += [f"Run with the remedy: {command}"]
    if entry.check:
        lines += wrap(f"How to see it: {entry.check}", width)
    if entry.torch:
        lines += [f"torch: {entry.torch}"]
    if entry.measured:
        lines += wrap(f"Measured with torch, by device: {'; '.join(entry.measured)}", width)
    if entry.frameworks:
        lines += wrap(f"Seen in: {', '.join(entry.frameworks)}", width)
    lines += wrap(f"References: {', '.join(entry.references)}", width)
    if command := make_command(entry):
        lines += [f"Reproduce: {command}"]
    return [*lines, f"Page: {entry.page}"]


def _list_remedies(entry: KnownFailure, places: str) -> list[str]:
    """Lists the remedies for users of the frameworks in the traceback, and then the general remedy.

    places: the traceback; empty to list the remedies for all frameworks.
    """
    named = [
        f"Remedy in {framework}: {entry.advise(framework)}"
        for framework in entry.remedies
        if not places or re.search(rf"\b{framework.replace('-', '_')}/", places)
    ]
    return [*named, f"Remedy: {entry.advice}"]


def _find_fix(entry: KnownFailure, explanation: Explanation) -> str:
    return find_fix_command(
        entry.short_code,
        function=_join_places(explanation),
        versions=explanation.versions,
        clues=explanation.clues,
    )


def _join_places(explanation: Explanation) -> str:
    return "\n".join(explanation.cause.first.frames if explanation.cause is not None else ()) or "no place"


def convert_entry_to_dict(entry: KnownFailure) -> dict[str, Any]:
    return {
        "id": entry.id,
        "short_code": entry.short_code,
        "page": entry.page,
        "title": entry.title,
        "verdict": entry.verdict,
        "signatures": [pattern.pattern for pattern in entry.signatures],
        "needs": [CLUES[name].fact for name in entry.needs],
        "check": entry.check,
        "torch": entry.torch,
        "measured": list(entry.measured),
        "frameworks": list(entry.frameworks),
        "cause": entry.cause,
        "remedy": entry.remedy,
        "remedies": dict(entry.remedies),
        "remedy_run": entry.remedy_run,
        "remedies_run": {framework: entry.remedies_run.get(framework, NOT_RUN) for framework in entry.remedies},
        "code": entry.code.strip("\n"),
        "references": list(entry.references),
        "evidence": entry.evidence,
        "command": make_command(entry),
        "remedy_command": make_remedy_command(entry),
    }


def make_command(entry: KnownFailure) -> str:
    """Returns the command that reproduces the failure; empty if no case reproduces it."""
    if not entry.reproduced:
        return ""
    device = f" --device {entry.evidence_device}" if entry.evidence_device else ""
    return f"fsdp-doctor probe{device} --case '{entry.evidence}'"


def make_remedy_command(entry: KnownFailure) -> str:
    """Returns the command that runs a case with the remedy; empty if there is no such case."""
    if entry.remedy_run == NOT_RUN or "::" in entry.remedy_run:
        return ""
    return f"fsdp-doctor probe --case '{entry.remedy_run}'"


def _match_lines(explanation: Explanation, width: int) -> list[str]:
    """Renders the certain entry, or the first likely entries, in full; of possible entries, only the open questions."""
    matches = explanation.matches
    places = _join_places(explanation)
    grade = matches[0].grade
    if grade == "possible":
        return _possible_lines(matches, width)
    whole = [match for match in matches if match.grade == grade][: 1 if grade == "known" else _MAX_ENTRIES]
    lines = []
    for match in whole:
        # The first is named in the answer.
        is_named = match is matches[0] and explanation.showing in ("failure", "hang")
        lines += ["", *([] if is_named else [*wrap(_name_match(match), width), ""])]
        lines += _render_body(
            match.entry, width, conditions=match.open, places=places, is_named=is_named and grade == "known"
        )
    rest = tuple(match.entry for match in matches if match not in whole)
    return lines + wrap_lines(
        _list_entries("Other entries with the same message (`fsdp-doctor explain ID`):", rest), width
    )


def _possible_lines(matches: tuple[Match, ...], width: int) -> list[str]:
    lines = [f"  {match.entry.id}: {next(iter((*match.against, *match.open)), '')}" for match in matches]
    heading = "Possible failures, each with what is open or speaks against it (`fsdp-doctor explain ID`):"
    return wrap_lines(["", heading, *lines[:_MAX_POSSIBLE]], width)


def _list_entries(heading: str, entries: tuple[KnownFailure, ...]) -> list[str]:
    return ["", heading, *(f"  {entry.id}: {entry.title}" for entry in entries)] if entries else []


# Hangs


def _render_hang(hang: Hang, width: int, *, ask: bool) -> list[str]:
    lines = [
        "",
        *(line for sentence in hang.sentences for line in wrap(sentence, width)),
        *_render_hang_table(hang.waiting),
    ]
    for waiting in hang.waiting[:_MAX_ROWS]:
        if frame := waiting.calling_frame:
            called = "is there through" if waiting.collective == "none" else "called it at"
            lines.append(f"{name_waiting_ranks([waiting])} {called} {frame}")
    if ask and any(not waiting.frames for waiting in hang.waiting):
        lines += wrap(_ASK_FOR_DUMPS, width)
    if ask and hang.by_stacks and not hang.differs:
        lines += wrap_lines(
            ["", "To find out where the others are, run it again, and then one of these:", *_WAYS], width
        )
    return lines


def _render_hang_table(waiting: tuple[Waiting, ...]) -> list[str]:
    """Renders a table of the ranks. Ranks in the same place share a row; an empty column is left out."""
    rows: dict[tuple[str, ...], list[Waiting]] = {}
    for rank in waiting:
        call = rank.call if rank.entered else f"not in this call; last in {rank.call}"
        launched, done = ("" if number is None else str(number) for number in (rank.enqueued, rank.completed))
        rows.setdefault((rank.group, call, rank.sent, rank.received, launched, done), []).append(rank)
    cells = [(_format_rank_numbers(ranks), *row, _format_longest_wait(ranks)) for row, ranks in rows.items()]
    used = [index for index in range(len(_HANG_HEADER) + 1) if any(row[index] for row in cells)]
    header = ("processes" if any(rank.is_process for rank in waiting) else "ranks", *_HANG_HEADER)
    table = [tuple(row[index] for index in used) for row in (header, *cells[:_MAX_ROWS])]
    widths = [max(len(row[column]) for row in table) for column in range(len(used))]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in table]
    more = [f"and {len(cells) - _MAX_ROWS} more"] if len(cells) > _MAX_ROWS else []
    return ["", *(f"    {line}" for line in (*lines, *more)), ""] if cells else []


def _format_rank_numbers(waiting: list[Waiting]) -> str:
    return name_waiting_ranks(waiting).partition(" ")[2]


def _format_longest_wait(waiting: list[Waiting]) -> str:
    """Formats the longest wait, in seconds."""
    times = [rank.waited_s for rank in waiting if rank.waited_s is not None]
    return f"{max(times):.0f}" if times else ""


# JSON


def _match_as_dict(match: Match) -> dict[str, Any]:
    entry = match.entry
    advice = {"title": entry.title, "cause": entry.cause, "remedy": entry.advice}
    return {"id": entry.id, "grade": match.grade, "open": list(match.open), "against": list(match.against), **advice}


def _convert_hang_to_dict(hang: Hang) -> dict[str, Any]:
    return {
        "parting": list(hang.sentences),
        "waiting": [{**dataclasses.asdict(rank), "call": rank.call} for rank in hang.waiting[:_MAX_WAITING_IN_JSON]],
    }


def _convert_cause_to_dict(group: Group) -> dict[str, Any]:
    first = group.first
    return {
        "type": first.type,
        "message": first.message,
        "file": first.file,
        "line": first.line,
        "source": first.source,
        "sources": sorted(filter(None, group.sources), key=_make_natural_key),
        "count": group.count,
        "time": first.time,
        "frames": first.frames,
    }
